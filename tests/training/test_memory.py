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
from peagle_train.training.memory import MemoryPlan, plan_memory
from tests.head.toys import toy_head
from tests.training.memory_worker import CPU

MIB = 2**20


Measure = Callable[[int, int], dict[str, Any]]
SIZES = (1000, 2000, 4000)


@pytest.fixture(scope="module")
def measured() -> Iterator[Measure]:
    """What a process comes to with a batch of n tokens under a budget (0: as much as is useful)."""
    command = [sys.executable, "-m", "tests.training.memory_worker"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdin is not None and process.stdout is not None

        def measure(tokens: int, budget: int) -> dict[str, Any]:
            print(tokens, budget, file=process.stdin, flush=True)
            return json.loads(process.stdout.readline())

        yield measure
        process.stdin.close()
    assert process.returncode == 0


@pytest.fixture(scope="module")
def free(measured: Measure) -> dict[int, dict[str, Any]]:
    return {tokens: measured(tokens, 0) for tokens in SIZES}


def test_the_measured_peak_is_the_planned_one(free: dict[int, dict[str, Any]]) -> None:
    for tokens, found in free.items():
        assert found["measured"] <= found["predicted"], (tokens, found)
        above, planned = (found[key] - found["resident"] for key in ("measured", "predicted"))
        assert above >= 0.6 * planned, (tokens, above, planned)


def test_the_peak_grows_linearly_with_the_batch(free: dict[int, dict[str, Any]]) -> None:
    """Twice the tokens, twice what they add: nothing holds pairs of tokens."""
    low, middle, high = (free[tokens]["measured"] - free[tokens]["resident"] for tokens in SIZES)
    assert high - middle <= 1.25 * 2 * (middle - low)


def test_a_tighter_budget_is_kept(measured: Measure, free: dict[int, dict[str, Any]]) -> None:
    tight = free[1000]["predicted"] - 60 * MIB
    found = measured(1000, tight)
    assert found["measured"] <= tight
    assert found["settings"]["group_rows"] < free[1000]["settings"]["group_rows"]


def plan(**changes: Any) -> MemoryPlan:
    given: dict[str, Any] = dict(
        longest=1000,
        positions=4,
        device=CPU,
        half=False,
        backend="sdpa",
        budget=1 << 40,
        resident=100 * MIB,
        states=MIB,
    )
    return plan_memory(toy_head(dtype=torch.float32), **{**given, **changes})


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
    with pytest.raises(PeagleError, match=r"Not even a short batch would; or raise train\.memory"):
        plan(budget=100 * MIB)


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
