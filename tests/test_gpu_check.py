"""The script behind `make gpu-check`, as far as it goes without a GPU: that it runs, notices, and says so."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle_train.head import backends
from peagle_train.head.prefix import SharedPrefix
from scripts.gpu_check import __main__ as command
from scripts.gpu_check import heads, others
from scripts.gpu_check.lines import Check, Settings, run

ROOT = Path(__file__).resolve().parents[1]


def check(
    monkeypatch: pytest.MonkeyPatch, output: Path, *arguments: str
) -> tuple[int, dict[str, dict[str, Any]]]:
    """Exit status, and the lines by part and name."""
    monkeypatch.setattr(sys, "argv", ["gpu_check", "--output", str(output), *arguments])
    status = command.main()
    lines = json.loads(output.read_text())["lines"]
    return status, {f"{line['part']}: {line['name']}": line for line in lines}


def test_a_tiny_run_on_the_cpu(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status, lines = check(monkeypatch, tmp_path / "out.json", "--device", "cpu", "--tiny")
    assert status == 0
    outcomes = {name: line["outcome"] for name, line in lines.items()}
    assert outcomes["kernels: fused-cpu, bfloat16, 64 dimensions"] == "ok"
    for dtype in ("float32", "bfloat16"):
        assert outcomes[f"backend:sdpa: attention, {dtype}, SmolLM2, window 50"] == "ok"
        assert outcomes[f"backend:sdpa: engine, {dtype}, windows"] == "ok"
        assert "NVIDIA" in lines[f"backend:flash: all, {dtype}"]["detail"]
        assert "no backward on CPU" in lines[f"backend:flex: all, {dtype}"]["detail"]
    step = lines["heads:sdpa: tiny, draft vocabulary 512, 400 tokens"]
    assert step["outcome"] == "ok"
    assert step["numbers"]["tokens"] == 399 and step["numbers"]["tokens_per_second"] > 0
    assert {part.split(":")[0] for part in lines} == {"kernels", "backend", "heads", "processes", "vllm"}
    assert all(line["detail"] for line in lines.values())


def test_a_wrong_backend_is_a_failure_and_the_exit_status_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    attend = backends.attend

    def shifted(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, prefix: SharedPrefix, *rest: Any) -> Any:
        return attend(q, k, v * 1.01, prefix, *rest)

    monkeypatch.setattr(backends, "attend", shifted)
    arguments = ("--device", "cpu", "--tiny", "--only", "backend:sdpa")
    status, lines = check(monkeypatch, tmp_path / "out.json", *arguments)
    assert status == 1
    failed = {name for name, line in lines.items() if line["outcome"] == "failure"}
    assert "backend:sdpa: attention, float32, SmolLM2" in failed
    assert "backend:sdpa: engine, float32, llama" in failed
    assert "failure" in capsys.readouterr().out


def test_memory_over_the_plan_is_a_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "OVER_PLAN", 0.1)
    lines = list(run("heads", heads.heads(Settings("cpu", True), "sdpa")))
    assert {line.outcome for line in lines} == {"failure"}
    assert "times the plan" in lines[0].detail


def test_a_device_that_is_too_small_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heads, "device_budget", lambda device, processes: 1000)
    (line, *_) = run("heads", heads.heads(Settings("cpu", True), "sdpa"))
    assert line.outcome == "skipped" and "too small" in line.detail


@pytest.mark.skipif(torch.cuda.is_available(), reason="the message is for machines without CUDA")
def test_without_cuda_it_says_so_with_status_2(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gpu_check"])
    assert command.main() == 2
    assert "sees no CUDA device" in capsys.readouterr().err


@pytest.mark.processes
def test_a_part_in_a_process_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a GPU: lines come through a pipe, and a process that dies is a failure."""
    monkeypatch.chdir(ROOT)
    (line,) = command._part("heads:flex", Settings("cpu", False))
    assert (line.outcome, line.part) == ("skipped", "heads:flex")
    died = [sys.executable, "-c", "print('a word of a library'); raise SystemExit(7)"]
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **rest: popen(died, **rest))
    (line,) = command._part("heads:flex", Settings("cpu", False))
    assert line.outcome == "failure" and "status 7" in line.detail


def test_the_tests_that_it_runs_become_lines(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "test_three.py").write_text(
        "import pytest\n\ndef test_good(): pass\n\ndef test_bad(): assert 1 == 2\n\n"
        "def test_left_out(): pytest.skip('no such thing')\n"
    )
    monkeypatch.setattr(others, "ROOT", tmp_path)

    def lines(*arguments: str) -> Iterator[Check]:
        return others._tests(list(arguments), {})

    found = {line.name: line for line in run("tests", lines("test_three.py"))}
    outcomes = {name: line.outcome for name, line in found.items()}
    assert outcomes == {"test_good": "ok", "test_bad": "failure", "test_left_out": "skipped"}
    assert "1 == 2" in found["test_bad"].detail and "no such thing" in found["test_left_out"].detail
    (line,) = run("tests", lines("test_missing.py"))
    assert line.outcome == "failure" and "no test ran" in line.detail


def test_plans_cover_every_head_without_allocating() -> None:
    plans, units = heads.plans()
    assert plans.row_count == len(heads.HEADS) * 2 * len(heads.TOKENS)
    assert units.row_count == len(heads.HEADS) * 2
    peaks = [float(cell) for cell in plans.columns[5].cells]  # type: ignore[arg-type]
    assert all(0 < peak < heads.PLANNED_ON / heads.GIB for peak in peaks)
