"""Killed at any moment, a training goes on and ends as one that was never stopped, bit for bit."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle_train.files import read_json
from peagle_train.training import checkpoint, validation
from peagle_train.training.__main__ import main as launched_main
from peagle_train.training.checkpoint import checkpoints
from peagle_train.training.loop import Loop
from peagle_train.training.module import DraftTraining
from tests.training.conftest import Made
from tests.training.ranks import TORCH_WAYS, WORLD, ZERO_WAYS, asked_for, ends_of, start_ranks
from tests.training.runs import assert_equal, end_of, fresh, start, train_here
from tests.training.test_loop import EAGLE3_HEAD, make_loop

STEPS = 12


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    """The training that nothing disturbed."""
    training = fresh(recipe, "whole")
    train_here(recipe, "whole")
    return training


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def at_call(owner: Any, name: str, number: int, *, after: bool = False) -> Callable[[], None]:
    """A sabotage: the process dies when `name` is called for the n-th time, or when that call has ended."""

    def sabotage() -> None:
        original, calls = getattr(owner, name), 0

        def mortal(*args: Any, **kwargs: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == number and not after:
                die()
            result = original(*args, **kwargs)
            if calls == number:
                die()
            return result

        setattr(owner, name, mortal)

    return sabotage


# Two micro-batches a step, validation at 0, 3, 6, 9, 12, checkpoints after 4, 8, 12.
MOMENTS = {
    "before the first checkpoint": at_call(Loop, "_step", 3),
    "between the micro-batches of a step": at_call(DraftTraining, "forward", 2 * 6 + 2),
    "between the gradients and the weights of a step": at_call(Loop, "_judge", 7, after=True),
    "while the best head is written": at_call(validation, "save_head", 2, after=True),
    "between validation and the log of the next step": at_call(Loop, "_validate", 4, after=True),
    "while the optimizer is written": at_call(checkpoint, "save_tensors", 2),
    "with only the optimizer written": at_call(checkpoint, "_write_part", 2, after=True),
    "before the folder has its name": at_call(checkpoint, "_write_rest", 2, after=True),
    "between the new checkpoint and the removal of the old": at_call(checkpoint.shutil, "rmtree", 1),
    "between the last checkpoint and the seal": at_call(Loop, "_save", 3, after=True),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_a_chosen_moment(recipe: Path, whole: Path, moment: str) -> None:
    training = fresh(recipe, "chosen")
    assert end_of(start(recipe, "chosen", sabotage=MOMENTS[moment])) == -signal.SIGKILL
    assert not read_json(training / "stage.json")["finished"]
    assert end_of(start(recipe, "chosen")) == 0
    assert_equal(training, whole)
    assert {p.name for p in (training / "checkpoints").iterdir()} == {"step-000008", "step-000012"}
    assert not [p for p in training.iterdir() if p.name.startswith(".")]


def test_killed_from_outside_again_and_again(recipe: Path, whole: Path) -> None:
    training, draw = fresh(recipe, "random"), random.Random(0)
    log = training / "log.jsonl"
    kills = 0
    while True:
        lines = len(log.read_bytes().splitlines()) if log.is_file() else 0
        pid = start(recipe, "random", "train.checkpoint_every=1", "train.keep_checkpoints=1")
        wanted, deadline = lines + draw.randint(1, 6), time.monotonic() + 60
        while os.waitpid(pid, os.WNOHANG)[0] == 0:
            assert time.monotonic() < deadline
            if log.is_file() and len(log.read_bytes().splitlines()) >= wanted:
                time.sleep(draw.random() * 0.05)
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
                kills += 1
                break
            time.sleep(0.002)
        else:
            break
    assert kills >= 2
    assert_equal(training, whole)


def test_an_eagle3_head_goes_on_exactly(made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    make_loop(made, tmp_path / "whole", EAGLE3_HEAD).run()
    stopped = make_loop(made, tmp_path / "killed", EAGLE3_HEAD)
    step = stopped._step
    monkeypatch.setattr(stopped, "_step", lambda s: step(s) if s < 10 else pytest.fail("killed"))
    with pytest.raises(pytest.fail.Exception):
        stopped.run()
    make_loop(made, tmp_path / "killed", EAGLE3_HEAD).run()
    assert_equal(tmp_path / "killed", tmp_path / "whole")


def test_training_draws_nothing_from_the_global_generator(made: Made, tmp_path: Path) -> None:
    loop = make_loop(made, tmp_path)
    before = torch.get_rng_state()
    loop.run()
    assert torch.equal(before, torch.get_rng_state())


def test_the_number_of_threads_is_that_of_the_first_start(recipe: Path) -> None:
    training = fresh(recipe, "threads")
    assert torch.get_num_threads() == 1
    used: list[int] = []

    def watched(threads: int, last: int) -> None:
        torch.set_num_threads(threads)
        step = Loop._step

        def watch(self: Loop, number: int) -> dict[str, Any]:
            (training.parent / "used").open("a").write(f"{torch.get_num_threads()}\n")
            return step(self, number) if number < last else die()  # type: ignore[return-value]

        Loop._step = watch  # type: ignore[method-assign]

    assert end_of(start(recipe, "threads", sabotage=lambda: watched(2, 6))) == -signal.SIGKILL
    assert end_of(start(recipe, "threads", sabotage=lambda: watched(1, STEPS))) == 0
    used = [int(n) for n in (training.parent / "used").read_text().split()]
    assert used == [2] * (7 + STEPS - 4)
    assert read_json(training / "checkpoints" / "step-000012" / "state.json")["engine"]["threads"] == 2


SLOW = [pytest.param(way, marks=pytest.mark.slow) for way in ("zero1", "zero2")]  # half a minute each


@pytest.mark.processes
@pytest.mark.parametrize("way", [*TORCH_WAYS, *SLOW, "zero3"])
def test_two_processes_killed_go_on_exactly(recipe: Path, tmp_path: Path, way: str) -> None:
    """The stage as launchers start it, with all that a wrapping splits."""
    if way in ZERO_WAYS:
        pytest.importorskip("deepspeed", reason="pip install 'peagle-train[cluster]'")
    undisturbed, training = fresh(recipe, f"{way}-whole"), fresh(recipe, f"{way}-killed")

    def attempt(name: str, sabotage: Callable[[], None] = lambda: None) -> tuple[list[int], str]:
        def work() -> None:
            sabotage()
            assert launched_main([str(recipe), f"name={name}", "train.accumulate=1"]) == 0

        with asked_for(way, tmp_path):
            return ends_of(tmp_path, start_ranks(tmp_path, work))

    def dying() -> None:
        step = Loop._step

        def mortal(self: Loop, number: int) -> dict[str, Any]:
            if number == 6:
                self.accelerator.wait_for_everyone()
                die()
            return step(self, number)

        Loop._step = mortal  # type: ignore[method-assign]

    ends, said = attempt(f"{way}-whole")
    assert ends == [0] * WORLD, said
    ends, said = attempt(f"{way}-killed", dying)
    assert ends == [-signal.SIGKILL] * WORLD, said
    assert [p.name for p in checkpoints(training / "checkpoints")] == ["step-000004"]
    ends, said = attempt(f"{way}-killed")
    assert ends == [0] * WORLD, said
    assert_equal(training, undisturbed)
