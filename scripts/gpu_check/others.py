"""Checks that are tests of the repository, run where they meet a GPU: several processes, and a vLLM."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from scripts.gpu_check.lines import Check, Failed, Settings, Skip, fail, skip

ROOT = Path(__file__).resolve().parents[2]
SAID = 400
"""Characters of what a failed test said."""

LIMIT = 1800
"""Seconds for one run of tests."""


def processes(settings: Settings) -> Iterator[Check]:
    """DDP, FSDP2 and ZeRO against one process."""
    name = "several processes"
    if settings.tiny:
        yield name, partial(skip, "left out of a tiny run; it is tests/training/test_distributed.py")
        return
    if settings.device == "cuda" and torch.cuda.device_count() < 2:
        yield name, partial(skip, f"it takes two GPUs, and here is {torch.cuda.device_count()}")
        return
    chosen = "two_processes_train_what_one_does or validation_is_a_sum"
    yield from _tests(["tests/training/test_distributed.py", "-k", chosen], {})


def vllm(settings: Settings) -> Iterator[Check]:
    """A vLLM serves a trained head, and drafts token for token what our code does."""
    name = "an exported head in vLLM"
    if settings.tiny:
        yield name, partial(skip, "left out of a tiny run; it is `make test-vllm`")
        return
    python = _vllm_python()
    if python is None:
        yield name, partial(skip, "no interpreter with a vLLM; name one: VLLM_PYTHON=/path/to/python")
        return
    look = "import torch, vllm; print(vllm.__version__, torch.cuda.is_available())"
    done = subprocess.run([python, "-c", look], capture_output=True, text=True, timeout=300)
    words = done.stdout.split()
    if done.returncode != 0 or len(words) < 2:
        yield name, partial(skip, f"{python} does not import vllm: {done.stderr.strip().splitlines()[-1:]}")
        return
    if settings.device == "cuda" and words[-1] != "True":
        yield name, partial(skip, f"the vLLM {words[-2]} of {python} sees no CUDA")
        return
    arguments = ["tests/vllm/test_vllm.py", "-m", "vllm", "-k", "SmolLM2-trained-4"]
    yield from _tests(arguments, {"VLLM_PYTHON": python})


def _vllm_python() -> str | None:
    if named := os.environ.get("VLLM_PYTHON"):
        path = Path(named).absolute()
        return str(path) if path.is_file() else None
    own = ROOT / ".venv-vllm" / "bin" / "python"
    return str(own) if own.is_file() else None


def _tests(arguments: list[str], environment: dict[str, str]) -> Iterator[Check]:
    """Runs pytest and gives one check per test."""
    with tempfile.TemporaryDirectory() as room:
        report = Path(room) / "report.xml"
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}"]
        try:
            done = subprocess.run(
                [*command, *arguments],
                cwd=ROOT,
                env={**os.environ, **environment},
                capture_output=True,
                text=True,
                timeout=LIMIT,
            )
        except subprocess.TimeoutExpired:
            yield arguments[0], partial(fail, f"not finished after {LIMIT} seconds")
            return
        cases = list(ElementTree.parse(report).iter("testcase")) if report.is_file() else []
    if not cases:
        yield arguments[0], partial(fail, f"no test ran: {(done.stdout + done.stderr).strip()[-400:]}")
    for case in cases:
        yield f"{case.get('name')}", partial(_outcome, case)


def _outcome(case: ElementTree.Element) -> tuple[str, dict[str, Any]]:
    for kind, raised in (("failure", Failed), ("error", Failed), ("skipped", Skip)):
        found = case.find(kind)
        if found is not None:
            # Of an assertion about a subprocess the end says most.
            raise raised(" ".join((found.get("message") or kind).split())[-SAID:])
    return f"{case.get('classname')}", {"seconds": float(case.get("time") or 0)}
