"""The memory that a plan tells is the memory that a training takes: `VmHWM` of a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from peagle_train import Run
from peagle_train.pipeline import run_stage
from peagle_train.planning import plan_recipe
from tests.tiny_run import tiny_recipe

CLOSE = 0.15
PLANNED = """
import sys
from peagle_train.planning import plan_recipe
print(plan_recipe(sys.argv[1], sys.argv[2:]).chosen.plan.peak)
"""


def in_a_process(*arguments: str) -> int:
    """The last number that a fresh interpreter prints: a plan counts the libraries of its own process."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    out = subprocess.check_output([sys.executable, *arguments], text=True, env=environment)
    return int(out.split()[-1])


def planned_and_measured(recipe: str, *overrides: str) -> tuple[int, int]:
    """Bytes: as planned before anything is there, and the peak of its training."""
    planned = in_a_process("-c", PLANNED, recipe, *overrides)
    with Run.open(recipe, overrides) as run:
        for stage in ("prepare", "extract"):
            run_stage(run, stage, Console(quiet=True))
    return planned, in_a_process("-m", "tests.planning.peak_worker", recipe, *overrides)


@pytest.mark.processes
def test_a_twins_peak_is_the_planned_one(tmp_path: Path) -> None:
    """Of a head that weighs more than the libraries around it."""
    train = {"positions": 5, "steps": 3, "batch_tokens": 1024, "accumulate": 1}
    recipe = tiny_recipe(tmp_path, "tiny", heldout=1, train=train)
    wide = ["head.hidden_size=1024", "head.intermediate_size=12288"]
    wide += ["data.train.count=8", "data.max_prompt_tokens=37"]  # what the rows are
    planned, measured = planned_and_measured(str(recipe), *wide)
    assert abs(planned - measured) <= CLOSE * measured, (planned, measured)
    assert measured > 6 * plan_recipe(recipe, wide).head.weights


@pytest.mark.slow
def test_smollm2s_peak_is_the_planned_one(tmp_path: Path) -> None:
    few = ["data.train.count=8", "data.validation.count=2", "data.heldout.stdlib.count=1"]
    short = ["train.steps=6", "train.warmup_steps=1", "train.validate_every=3", "train.checkpoint_every=3"]
    overrides = [f"output={tmp_path}", *few, "data.heldout.humaneval.count=1", "data.workers=1", *short]
    planned, measured = planned_and_measured("smollm2", *overrides)
    assert abs(planned - measured) <= CLOSE * measured, (planned, measured)
