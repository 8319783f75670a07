"""A vLLM that gives hidden states, seen from the worker that stores them.

    batches of rows ──► runner.py (vLLM's interpreter) ──► one file a row ──► here: read, checked, deleted

Two batches are on their way at any time, so the engine never waits for the store, and no more than the
states of two batches lie in files. They lie under a hidden name in the folder of the states, where the
next `peagle extract` clears away what a killed one left; the engine's process ends with ours.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any

from torch import Tensor

from data_prep.jobs import Job, VllmPlan
from peagle_train.errors import PeagleError
from peagle_train.tensors import load_tensors

RUNNER = Path(__file__).parent / "engine" / "runner.py"
_AHEAD = 1  # batches sent beyond the one that is waited for
_ROWS = 256  # of one pass at most
_LAST_LINES = 12
_ENDS_WITHIN = 10  # seconds after its input ended; then it is killed
_FORCED = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # the runner steps the engine itself
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",  # the target is a folder
}
_DEFAULTS = {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "VLLM_CPU_KVCACHE_SPACE": "4"}  # GB; read on a CPU only

States = tuple[Tensor, Tensor]
"""Of a row of n tokens: aux [n-1, A*H] and last [n-1, H], in the target's dtype."""


class VllmStates:
    """One runner process, for the length of a `with` block. `start` it before anything is asked.

    facts: after `start`, what the runner said of itself: vllm (its version), device, gpus.
    """

    def __init__(self, plan: VllmPlan, scratch: Path):
        """plan: interpreter, log and GPU. scratch: folder for the files in between; removed at the end."""
        self._plan, self._scratch = plan, scratch
        self._layers: list[int] = []
        self._columns: list[int] = []
        self.facts: dict[str, Any] = {}

    def __enter__(self) -> VllmStates:
        with Path(self._plan.log).open("wb") as log:
            self._process = subprocess.Popen(
                [self._plan.python, str(RUNNER)],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=_environment(self._plan.gpu),
                start_new_session=True,  # a group of its own, to be ended with all of vLLM's processes
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_ENDS_WITHIN)
        with suppress(ProcessLookupError):  # it ended, and all that it started
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._process.stdout.close()
        shutil.rmtree(self._scratch, ignore_errors=True)

    def start(self, job: Job) -> None:
        """Loads the target of a job, in place of the one before. Raises PeagleError where vLLM cannot."""
        plan, kept = job.vllm, job.states
        assert plan is not None and kept is not None
        self._scratch.mkdir(parents=True, exist_ok=True)
        self._layers = sorted({*kept.aux_layers, plan.num_layers})
        self._columns = [self._layers.index(layer) for layer in kept.aux_layers]
        engine = engine_settings(job, plan, self._layers, self._scratch)
        self._send(folder=str(self._scratch), engine=engine, all_gpus=plan.all_gpus, device=job.device)
        self.facts = self._reply("while loading the target")["ready"]

    def states(
        self,
        batches: Iterable[tuple[int, Sequence[Sequence[int]]]],
        on_tokens: Callable[[int], None] = lambda count: None,
    ) -> Iterator[tuple[int, list[States]]]:
        """The states of batches of rows, each a list of token ids, in the order given.

        Every token but a row's last is fed. on_tokens: called with the size of each row that is computed.
        Raises PeagleError if vLLM ends, or gives states that are not those of the row.
        """
        asked: dict[str, int] = {}  # tokens of the rows that vLLM has not answered
        files: dict[str, str] = {}
        sent: list[tuple[int, Sequence[Sequence[int]]]] = []
        for batch in batches:
            sent.append(batch)
            self._send(rows={_name(batch[0], row): ids[:-1] for row, ids in enumerate(batch[1])})
            asked.update({_name(batch[0], row): len(ids) for row, ids in enumerate(batch[1])})
            if len(sent) > _AHEAD:
                yield self._collected(*sent.pop(0), asked, files, on_tokens)
        for batch in sent:
            yield self._collected(*batch, asked, files, on_tokens)

    def _collected(
        self,
        batch: int,
        rows: Sequence[Sequence[int]],
        asked: dict[str, int],
        files: dict[str, str],
        on_tokens: Callable[[int], None],
    ) -> tuple[int, list[States]]:
        found = []
        for row, ids in enumerate(rows):
            name = _name(batch, row)
            while name not in files:
                reply = self._reply(f"in batch {batch}")
                files[reply["row"]] = reply["file"]
                on_tokens(asked.pop(reply["row"]))
            found.append(self._read(Path(files.pop(name)), list(ids[:-1])))
        return batch, found

    def _read(self, file: Path, token_ids: list[int]) -> States:
        tensors = load_tensors(file)
        file.unlink()
        states = tensors["states"]  # [n-1, layers, H]
        expected = (len(token_ids), len(self._layers))
        if tensors["token_ids"].tolist() != token_ids or tuple(states.shape[:2]) != expected:
            raise PeagleError(
                f"{file.name}: vLLM gave states {list(states.shape)}, or of other tokens than were sent; "
                f"expected those of {expected[0]} tokens and {expected[1]} layers. Written for vLLM 0.32, "
                f"found {self.facts['vllm']}: install 0.32, or set states.backend=hf"
            )
        return states[:, self._columns].flatten(1), states[:, -1]

    def _send(self, **message: Any) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(json.dumps(message).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it ended: the reply that does not come tells why

    def _reply(self, when: str) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise PeagleError(self._ended(when))
        reply: dict[str, Any] = json.loads(line)
        if "fault" in reply:
            raise PeagleError(
                f"states.backend vllm: {reply['fault']}; name another interpreter in VLLM_PYTHON"
            )
        return reply

    def _ended(self, when: str) -> str:
        status = self._process.wait()
        how = f"by signal {-status}" if status < 0 else f"with status {status}"
        log = Path(self._plan.log)
        lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        shown = "\n".join(f"  | {line}" for line in lines[-_LAST_LINES:]) or "  | (it wrote nothing)"
        hint = " (often too little memory)" if status == -signal.SIGKILL else ""
        return (
            f"vLLM ended {how} {when}{hint}; finished batches are kept, and the same command goes on from "
            f"them. Its last lines ({log}):\n{shown}"
        )


def engine_settings(job: Job, plan: VllmPlan, layers: Sequence[int], scratch: Path) -> dict[str, Any]:
    """The arguments of vllm.LLM with which states of `layers` (rising ids) are written to `scratch`.

    A row longer than plan.batch_tokens is read in several passes; its states come together in the cache.
    """
    extraction = {"hf_config": {"eagle_aux_hidden_state_layer_ids": list(layers)}}
    return {
        "model": job.target,
        "dtype": job.dtype,
        "trust_remote_code": job.trust_remote_code,
        "skip_tokenizer_init": True,
        "language_model_only": True,  # of a multimodal target the vision tower stays on the disk
        # Rows are read, nothing is generated: there is no small step for a CUDA graph to speed up.
        "enforce_eager": True,
        "max_model_len": plan.longest,  # a prompt of one less, and the one token that vLLM insists on
        "max_num_batched_tokens": plan.batch_tokens,
        "max_num_seqs": min(_ROWS, plan.batch_tokens),
        "enable_chunked_prefill": True,
        # A token found in the prefix cache is not computed, so it would have no states.
        "enable_prefix_caching": False,
        "disable_log_stats": True,
        "speculative_config": {
            "method": "extract_hidden_states",
            "num_speculative_tokens": 1,
            "draft_model_config": extraction,
        },
        "kv_transfer_config": {
            "kv_connector": "StatesConnector",
            "kv_connector_module_path": "states_connector",
            "kv_role": "kv_producer",
            "kv_connector_extra_config": {"folder": str(scratch)},
        },
    }


def _environment(gpu: int | None) -> dict[str, str]:
    # PYTHONPATH leads to packages of our interpreter, which are not vLLM's.
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    environment = {**_DEFAULTS, **environment, **_FORCED}
    if gpu is not None:
        visible = environment.get("CUDA_VISIBLE_DEVICES", "").split(",")
        environment["CUDA_VISIBLE_DEVICES"] = (
            visible[gpu] if len(visible) > gpu and visible[gpu] else str(gpu)
        )
    return environment


def _name(batch: int, row: int) -> str:
    return f"{batch}-{row}"
