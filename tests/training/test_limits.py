"""What an unfinished training accepts and refuses, and what ends one before its last step."""

from __future__ import annotations

import io
import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from peagle_train.cli import app
from peagle_train.errors import PeagleError, StaleError
from peagle_train.files import read_json, write_json
from peagle_train.head.acceptance import Acceptance
from peagle_train.recipe.schema import TrainSection
from peagle_train.training import validation
from peagle_train.training.checkpoint import checkpoints, last_recorded
from peagle_train.training.ending import steps_taken, why_ended
from peagle_train.training.loop import Loop
from peagle_train.training.stage import FREE
from tests.training.conftest import Made
from tests.training.runs import assert_equal, end_of, fresh, start, train_here
from tests.training.test_loop import log_of, make_loop


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    training = fresh(recipe, "all")
    train_here(recipe, "all")
    return training


@pytest.fixture
def unfinished(recipe: Path) -> Path:
    """The run `half`: killed at step 7, saved at step 4."""
    training = fresh(recipe, "half")

    def die_at_7() -> None:
        step = Loop._step

        def mortal(self: Loop, number: int) -> dict[str, Any]:
            if number == 6:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, number)

        Loop._step = mortal  # type: ignore[method-assign]

    assert end_of(start(recipe, "half", sabotage=die_at_7)) == -signal.SIGKILL
    assert [path.name for path in checkpoints(training / "checkpoints")] == ["step-000004"]
    return training


def test_a_changed_recipe_is_refused_with_the_keys_and_the_cure(
    recipe: Path, unfinished: Path, whole: Path
) -> None:
    changed = ["train.learning_rate=1e-3", "head.layers=2", "seed=1"]
    with pytest.raises(StaleError) as refused:
        train_here(recipe, "half", *changed)
    said = str(refused.value)
    for part in (
        "unfinished training (step-000004)",
        "train.learning_rate: 0.002, now 0.001",
        "head.layers: 1, now 2",
        "seed: 0, now 1",
        f"`peagle train {recipe} name=half train.learning_rate=1e-3 head.layers=2 seed=1 --anew`",
    ):
        assert part in said
    assert "train.steps" not in said
    train_here(recipe, "half")  # put back, it goes on
    assert_equal(unfinished, whole)
    result = train_here(recipe, "half", "train.learning_rate=1e-3")  # a finished one is only set aside
    assert not result.skipped and len(list(unfinished.parent.glob("training.old-*"))) == 1


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ("train.backend=flash", "flash"),
        ("train.memory=0.01", "Not even a batch of one token would fit: raise"),
    ],
)
@pytest.mark.parametrize("anew", [False, True])
def test_what_cannot_run_here_costs_no_earlier_training(
    recipe: Path, wrong: str, said: str, anew: bool
) -> None:
    training = fresh(recipe, "kept")
    train_here(recipe, "kept", "train.steps=4")
    before = {p: p.stat().st_mtime_ns for p in training.rglob("*")}
    with pytest.raises(PeagleError, match=said):
        train_here(recipe, "kept", "train.learning_rate=1e-3", wrong, anew=anew)
    assert {p: p.stat().st_mtime_ns for p in training.rglob("*")} == before
    assert {p.name for p in training.parent.glob("*training*")} == {"training"}
    assert not list(training.parent.glob(".training*"))


def test_another_number_of_processes_is_refused(recipe: Path, unfinished: Path) -> None:
    record = read_json(unfinished / "stage.json")
    record["parts"]["processes"] = 2
    record["fingerprint"] = "0123456789abcdef"
    write_json(unfinished / "stage.json", record)
    with pytest.raises(StaleError, match=r"begun otherwise \(processes: 2, now 1\)"):
        train_here(recipe, "half")


def test_keys_that_change_no_step_may_change(recipe: Path, unfinished: Path, whole: Path) -> None:
    values = {
        "log_every": 1,
        "checkpoint_every": 5,
        "keep_checkpoints": 3,
        "patience": 50,
        "max_hours": 9.5,
        "on_spike": "skip",
        "memory": 9.5,
    }
    assert set(values) == FREE
    train_here(recipe, "half", *(f"train.{key}={value}" for key, value in values.items()))
    assert_equal(unfinished, whole)


def test_without_a_checkpoint_nothing_is_refused(recipe: Path, unfinished: Path) -> None:
    for path in checkpoints(unfinished / "checkpoints"):
        path.rename(unfinished / "gone")
    train_here(recipe, "half", "train.learning_rate=1e-3")
    assert len(list(unfinished.parent.glob("training.old-*"))) == 1


@pytest.mark.parametrize("finished", [True, False])
def test_anew_sets_aside_and_begins_at_step_0(
    recipe: Path, unfinished: Path, whole: Path, finished: bool
) -> None:
    if finished:
        train_here(recipe, "half")
    before = sorted(unfinished.rglob("*"))
    runner = CliRunner()
    result = runner.invoke(app, ["train", str(recipe), "name=half", "--anew"], env={"COLUMNS": "300"})
    assert result.exit_code == 0, result.output
    assert (
        "going on from" not in result.output
        and "to be made anew (--anew); kept as training.old-" in result.output
    )
    (aside,) = unfinished.parent.glob("training.old-*")
    assert sorted(unfinished / p.relative_to(aside) for p in aside.rglob("*")) == before
    assert_equal(unfinished, whole)


def script(monkeypatch: pytest.MonkeyPatch, accepted: list[int]) -> None:
    """Validations that have these acceptances, in tenths of a token."""
    scores = iter(accepted)
    monkeypatch.setattr(validation, "measure", lambda *_: Acceptance(4, 10, [next(scores), 0, 0, 0]))


def test_patience_ends_a_training_and_keeps_the_best(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, [1, 3, 2, 5, 5, 4, 9])  # at 0, 2, 4, ...; equal is not better
    loop = make_loop(made, tmp_path, validate_every=2, checkpoint_every=50, patience=2)
    standing = loop.run()
    assert (standing.step, standing.best_step, standing.stale) == (10, 6, 2)
    assert why_ended(standing, loop.section) == (
        "10 of 12 steps: no better acceptance in 2 validations (train.patience)"
    )
    assert read_json(tmp_path / "best" / "score.json")["step"] == 6
    assert [path.name for path in checkpoints(tmp_path / "checkpoints")] == ["step-000010"]
    # Killed before the stage was sealed, it takes no further step.
    again = make_loop(made, tmp_path, validate_every=2, checkpoint_every=50, patience=2)
    assert again.run() == standing


def test_patience_counts_over_a_stop(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    script(monkeypatch, [5, 4, 3, 2, 1])
    make_loop(made, tmp_path, steps=4, validate_every=2, checkpoint_every=4, patience=3).run()
    loop = make_loop(made, tmp_path, validate_every=2, patience=3)
    assert loop.run().step == 6


def test_a_recipes_limits_end_it_and_wider_ones_take_it_further(
    recipe: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    training = fresh(recipe, "limited")
    now = time.monotonic
    step = Loop._step
    hours = 0.0

    def long(self: Loop, number: int) -> dict[str, Any]:
        nonlocal hours
        hours += 1.0
        return step(self, number)

    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_step", long)
        patch.setattr("peagle_train.training.loop.time.monotonic", lambda: now() + 3600 * hours)
        result = train_here(recipe, "limited", "train.max_hours=5")
        assert "5 of 12 steps: 5.00 hours (train.max_hours) on 8 rows" in result.message
        assert steps_taken(training, TrainSection(steps=12)) == 5
        log = log_of(training)
        assert log[-1]["step"] == 5 and "validation" in log[-1]  # measured where it ended
        assert train_here(recipe, "limited", "train.max_hours=5").skipped
        hours = 0.0
        result = train_here(recipe, "limited", "train.max_hours=7")
        assert "7 of 12 steps: 7.00 hours" in result.message  # over all attempts
    saved = last_recorded(training / "checkpoints")
    assert saved is not None and saved.standing.seconds == pytest.approx(7 * 3600, abs=60)
    console = Console(file=io.StringIO(), width=300)
    assert "12 steps on 8 rows" in train_here(recipe, "limited", console=console).message
    assert "goes on from step 7, for its limits are wider now" in console.file.getvalue()
    losses = [[r["loss"] for r in log_of(t) if "loss" in r] for t in (training, whole)]
    assert losses[0] == losses[1]
