"""Runs vLLM and has it write the hidden states of rows of token ids. See ../backend.py for who asks.

    python runner.py < messages > replies        one JSON object a line, both ways

in   {"folder": DIR, "engine": {...}, "all_gpus": false, "device": "auto"}
                                       start an engine with these arguments of vllm.LLM, in place of the last
     {"rows": {"NAME": [ids], ...}}    read these rows too
out  {"ready": {"vllm": "0.32.0", "device": "cpu", "gpus": 1}}
     {"row": "NAME", "file": PATH}     its states lie there (states_connector.py), for the reader to delete
     {"fault": "..."}                  what the user can mend; the process ends

It ends when its input ends, or when the process that started it is gone, and takes DIR with it.
"""

from __future__ import annotations

import gc
import json
import os
import queue
import shutil
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

_WRITTEN_WITHIN = 300  # seconds from the end of a request to its file


class Fault(Exception):
    """What the user can mend."""


def main() -> int:
    """Answers messages until there are no more; returns the exit status."""
    # Whatever a library prints must not be taken for a reply.
    replies = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**reply: Any) -> None:
        print(json.dumps(reply), file=replies, flush=True)

    inbox: queue.Queue[dict[str, Any] | None] = queue.Queue()
    folders: set[str] = set()
    threading.Thread(target=_follow_parent, args=(os.getppid(), folders), daemon=True).start()
    threading.Thread(target=_read, args=(inbox,), daemon=True).start()
    try:
        _serve(inbox, folders, say)
    except Fault as fault:
        say(fault=str(fault))
        return 1
    finally:
        _remove(folders)
    return 0


def _serve(inbox: queue.Queue[dict[str, Any] | None], folders: set[str], say: Any) -> None:
    engine: Any = None
    while True:
        idle = engine is None or not engine.busy
        try:
            message = inbox.get(block=idle)
        except queue.Empty:
            message = {}
        if message is None:
            return
        if "engine" in message:
            if engine is not None:
                engine.close()
                engine = None
            folders.add(message["folder"])
            engine = Engine(message)
            say(ready=engine.facts)
        elif "rows" in message:
            engine.add(message["rows"])
        if engine is not None and engine.busy:
            for name, file in engine.step():
                say(row=name, file=file)


class Engine:
    """One vLLM, in this process (its workers, if it has several GPUs, in others)."""

    def __init__(self, settings: dict[str, Any]):
        try:
            import vllm
        except ImportError as error:
            raise Fault(f"{sys.executable} has no vLLM ({error})") from error
        from vllm.model_executor.models import registry
        from vllm.platforms import current_platform

        device = current_platform.device_type
        wanted = settings["device"].partition(":")[0]
        if wanted not in ("auto", device):
            raise Fault(
                f"target.device is {wanted}, but the vLLM of {sys.executable} runs on {device or 'no device'}"
            )
        if device == "cpu":
            # vLLM looks at each new class in a process of its own, half a minute each, to keep CUDA out of
            # this one.
            registry._run_in_subprocess = lambda look: look()
        gpus = _visible_gpus() if settings["all_gpus"] and device == "cuda" else 1
        self._sampling = vllm.SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True, detokenize=False)
        self._llm = vllm.LLM(**settings["engine"], tensor_parallel_size=gpus)
        self._engine = self._llm.llm_engine
        self._running: set[str] = set()
        self._waiting: dict[str, tuple[str, float]] = {}  # ended: the file that will be there, since when
        self.facts = {"vllm": vllm.__version__, "device": device, "gpus": gpus}

    @property
    def busy(self) -> bool:
        """Whether there are rows whose states are not written yet."""
        return bool(self._running or self._waiting)

    def add(self, rows: dict[str, list[int]]) -> None:
        for name, token_ids in rows.items():
            self._engine.add_request(name, {"prompt_token_ids": token_ids}, self._sampling)
            self._running.add(name)

    def step(self) -> list[tuple[str, str]]:
        """One pass of the model; names and files of the rows that are there now."""
        for output in self._engine.step():
            if output.finished:
                file = (output.kv_transfer_params or {}).get("file")
                if file is None:
                    raise RuntimeError(f"row {output.request_id}: vLLM ended it without its states")
                self._running.remove(output.request_id)
                self._waiting[output.request_id] = file, time.monotonic()
        done = [(name, file) for name, (file, _) in self._waiting.items() if Path(file).exists()]
        for name, _ in done:
            del self._waiting[name]
        if not done and not self._running and self._waiting:
            name, (file, since) = next(iter(self._waiting.items()))
            if time.monotonic() - since > _WRITTEN_WITHIN:
                raise RuntimeError(f"row {name}: {file} was not written in {_WRITTEN_WITHIN} s")
            time.sleep(0.001)  # the writing thread is at work
        return done

    def close(self) -> None:
        """Gives back what the engine holds, so that another one can start."""
        from vllm.distributed import cleanup_dist_env_and_memory

        del self._llm, self._engine
        gc.collect()
        cleanup_dist_env_and_memory()


def _visible_gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _read(inbox: queue.Queue[dict[str, Any] | None]) -> None:
    for line in sys.stdin:
        inbox.put(json.loads(line))
    inbox.put(None)


def _remove(folders: set[str]) -> None:
    for folder in folders:
        shutil.rmtree(folder, ignore_errors=True)


def _follow_parent(parent: int, folders: set[str]) -> None:
    """Ends this process and its workers once its parent is gone, even killed."""
    while os.getppid() == parent:
        time.sleep(0.5)
    _remove(folders)
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


if __name__ == "__main__":
    sys.exit(main())
