"""The memory plan: what it promises is what a process uses."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from rich.console import Console

from peagle_train.errors import PeagleError
from peagle_train.head.engine import EngineSettings
from peagle_train.training import memory
from peagle_train.training.memory import MemoryPlan, doubts, plan_memory
from tests.head.toys import EAGLE3, toy_head
from tests.training.memory_worker import CPU

MIB = 2**20


Found = dict[str, Any]
Measure = Callable[[str, int, int], Found]
SIZES = (500, 1000, 2000)


@pytest.fixture(scope="module")
def measured() -> Iterator[Measure]:
    """What a process comes to with a batch of n tokens under a budget (0: as much as is useful)."""
    command = [sys.executable, "-m", "tests.training.memory_worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def measure(method: str, tokens: int, budget: int) -> Found:
            print(method, tokens, budget, file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield measure
        process.stdin.close()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def free(measured: Measure) -> dict[int, Found]:
    """By tokens, with as much memory as is useful."""
    return {tokens: measured("peagle", tokens, 0) for tokens in SIZES}


def assert_as_planned(found: Found) -> None:
    assert found["measured"] <= found["predicted"], found
    above, planned = (found[key] - found["resident"] for key in ("measured", "predicted"))
    assert above >= 0.7 * planned, (above, planned, found)


@pytest.mark.processes
def test_the_measured_peak_is_the_planned_one(free: dict[int, Found]) -> None:
    for found in free.values():
        assert_as_planned(found)


@pytest.mark.processes
def test_the_unroll_of_an_eagle3_head_is_planned_as_one_graph(measured: Measure) -> None:
    found = measured("eagle3", 1000, 0)
    assert_as_planned(found)
    assert found["settings"]["group_rows"] == 3 * 1000


@pytest.mark.processes
def test_the_peak_grows_linearly_with_the_batch(free: dict[int, Found]) -> None:
    """Twice the tokens, twice what they add: nothing holds pairs of tokens."""
    low, middle, high = (free[tokens]["measured"] - free[tokens]["resident"] for tokens in SIZES)
    assert high - middle <= 1.25 * 2 * (middle - low)


@pytest.mark.processes
def test_a_tighter_budget_is_kept(measured: Measure, free: dict[int, Found]) -> None:
    tight = free[1000]["predicted"] - 60 * MIB
    found = measured("peagle", 1000, tight)
    assert found["measured"] <= tight
    assert found["settings"]["group_rows"] < free[1000]["settings"]["group_rows"]


def plan(**changes: Any) -> MemoryPlan:
    given: dict[str, Any] = dict(
        head=toy_head(dtype=torch.float32),
        longest=1000,
        shares=[1.0, 1.0, 1.0],
        device=CPU,
        half=False,
        backend="sdpa",
        budget=1 << 40,
        resident=100 * MIB,
        states=MIB,
    )
    return plan_memory(**{**given, **changes})


def test_what_weighs_more_gives_way_first_and_no_further_than_needed() -> None:
    roomy = plan()
    assert (roomy.settings.group_rows, roomy.settings.loss_rows) == (2048, 4000)
    less = plan(budget=roomy.peak - 1)
    assert less.peak < roomy.peak and less.settings != roomy.settings
    assert plan(budget=roomy.peak).settings == roomy.settings


def test_a_run_that_goes_on_keeps_the_cut_it_began_with() -> None:
    began = EngineSettings(77, 33, "sdpa")
    assert plan(cut=began, budget=0).settings == began


def test_what_cannot_fit_is_refused_with_what_would() -> None:
    least = plan(budget=plan(cut=EngineSettings(64, 16)).peak)
    with pytest.raises(PeagleError, match=r"batch of 1,000 tokens needs .* A batch of \d+ tokens"):
        plan(budget=least.peak - MIB // 2)
    unroll = toy_head(**EAGLE3, dtype=torch.float32)
    with pytest.raises(PeagleError, match=r"batch of 1,000 tokens needs .* A batch of \d+ tokens"):
        plan(head=unroll, budget=plan(head=unroll, cut=EngineSettings(3000, 16)).peak - MIB)
    with pytest.raises(PeagleError, match=r"Not even a batch of one token would fit: raise train\.memory"):
        plan(budget=100 * MIB)


def test_doubts_about_a_plan_are_told() -> None:
    assert doubts(plan(budget=1 << 30), CPU, half=False, kept=False) == []
    (more,) = doubts(plan(budget=1 << 60), CPU, half=False, kept=True)
    assert "and the whole device has" in more
    (kept,) = doubts(plan(cut=EngineSettings(2048, 512), budget=MIB), CPU, half=False, kept=True)
    assert "keeps the cut that it began with" in kept
    (half,) = doubts(plan(budget=1 << 30), CPU, half=True, kept=False)
    assert "oneDNN" in half


def test_the_table_names_every_part() -> None:
    console = Console(record=True, width=100, file=io.StringIO())
    console.print(plan().table())
    text = console.export_text()
    assert "mask slots by 2,048, logits by 4,000 rows" in text and "budget" in text and "GiB" in text


def test_more_than_planned_is_a_warning(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    monkeypatch.setattr(memory, "peak_bytes", lambda device: 2 << 40)
    memory.report_peak(plan(), CPU, Console(width=120))
    assert "warning: memory: 2048.00 GiB at the peak" in capsys.readouterr().out
