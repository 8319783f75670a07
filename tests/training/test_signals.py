"""SIGTERM and SIGINT: saved, told how to go on, and exact afterwards."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from peagle_train.training.checkpoint import checkpoints
from peagle_train.training.loop import Loop
from tests.training.runs import assert_equal, end_of, fresh, start, train_here

CLI = [sys.executable, "-c", "from peagle_train.cli import main; main()"]


@pytest.fixture(scope="module")
def whole(recipe: Path) -> Path:
    training = fresh(recipe, "undisturbed")
    train_here(recipe, "undisturbed")
    return training


def wait_for(condition: Callable[[], Any], seconds: float = 120) -> Any:
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "waited in vain"
        time.sleep(0.01)
    return result


def slow_steps() -> None:
    """A sabotage: there is time to hit any step."""
    step = Loop._step

    def slow(self: Loop, number: int) -> dict[str, Any]:
        time.sleep(0.05)
        return step(self, number)

    Loop._step = slow  # type: ignore[method-assign]


def lines_of(training: Path) -> int:
    log = training / "log.jsonl"
    return len(log.read_bytes().splitlines()) if log.is_file() else 0


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_the_first_signal_saves_and_says_how_to_go_on(
    recipe: Path, whole: Path, capfd: pytest.CaptureFixture[str], stop: signal.Signals
) -> None:
    training = fresh(recipe, "stopped")
    pid = start(recipe, "stopped", "train.checkpoint_every=100", sabotage=slow_steps)
    wait_for(lambda: lines_of(training) >= 6)  # a score and five steps, of twelve
    os.kill(pid, stop)
    os.kill(pid, stop)  # the same one, passed on by a launcher
    assert end_of(pid) == 128 + stop
    (saved,) = checkpoints(training / "checkpoints")
    step = int(saved.name[-6:])
    assert 5 <= step < 12
    told = capfd.readouterr().err
    command = f"peagle train {recipe} name=stopped train.checkpoint_every=100"
    assert f"{stop.name}: stopped after step {step} of 12, saved in {training / 'checkpoints'}" in told
    assert told.strip().endswith(f"go on with: {command}")
    train_here(recipe, "stopped", *shlex.split(command)[4:])
    assert_equal(training, whole)


@pytest.mark.parametrize("stop", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(recipe: Path, stop: signal.Signals) -> None:
    training = fresh(recipe, "hurried")

    def stuck() -> None:
        def endless(*_: Any) -> None:
            (training / "reached").touch()
            while True:
                time.sleep(60)

        Loop._step = endless  # type: ignore[method-assign,assignment]

    pid = start(recipe, "hurried", sabotage=stuck)
    wait_for((training / "reached").exists)
    os.kill(pid, stop)
    time.sleep(0.3)
    os.kill(pid, stop)
    time.sleep(1.0)
    assert os.waitpid(pid, os.WNOHANG) == (0, 0)  # those two were one
    os.kill(pid, stop)
    assert end_of(pid) == 128 + stop
    assert not checkpoints(training / "checkpoints")


def test_a_signal_in_the_last_step_stops_the_command_too(recipe: Path, whole: Path) -> None:
    """Or `peagle run` would go on to the export."""
    training = fresh(recipe, "late")

    def late() -> None:
        save = Loop._save

        def signalled(self: Loop) -> None:
            save(self)
            if self.standing.step == 12:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.2)

        Loop._save = signalled  # type: ignore[method-assign]

    assert end_of(start(recipe, "late", sabotage=late)) == -signal.SIGTERM
    train_here(recipe, "late")
    assert_equal(training, whole)


@pytest.mark.processes
def test_the_command_line_leaves_with_the_signals_code(recipe: Path) -> None:
    training = fresh(recipe, "typed")
    arguments = [str(recipe), "name=typed", "train.steps=3000", "train.validate_every=1000"]
    process = subprocess.Popen(
        [*CLI, "run", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "COLUMNS": "300"},
    )
    wait_for(lambda: lines_of(training) >= 2)
    process.send_signal(signal.SIGTERM)
    out, told = process.communicate(timeout=120)
    assert process.returncode == 143
    assert "SIGTERM: this step is finished and saved; a second signal ends at once" in out
    assert told.strip().endswith(f"go on with: {shlex.join(['peagle', 'run', *arguments])}")
    assert not (training.parent / "head").exists()


def launched(recipe: Path, name: str, *overrides: str) -> subprocess.Popen[str]:
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    arguments = ["-m", "peagle_train.training", str(recipe), f"name={name}", *overrides]
    return subprocess.Popen(
        [sys.executable, *launch, *arguments],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def workers(process: subprocess.Popen[str]) -> Iterator[psutil.Process]:
    return (p for p in psutil.Process(process.pid).children(recursive=True) if "RANK" in p.environ())


@pytest.mark.slow  # four launches of torchrun, each with seconds of imports per process
def test_two_processes_stop_together_and_go_on_exactly(recipe: Path) -> None:
    whole, training = fresh(recipe, "both"), fresh(recipe, "pair")
    more = ["train.steps=40"]
    done = launched(recipe, "both", *more)
    out, _ = done.communicate(timeout=240)
    assert done.returncode == 0, out
    for harm in (signal.SIGTERM, signal.SIGKILL):
        process = launched(recipe, "pair", *more)
        before = lines_of(training)
        wait_for(lambda before=before: lines_of(training) >= before + 6)
        (second,) = (p for p in workers(process) if p.environ()["RANK"] == "1")
        second.send_signal(harm)  # one process alone
        out, _ = process.communicate(timeout=240)
        assert process.returncode
        if harm == signal.SIGTERM:
            assert out.count("SIGTERM: stopped after step ") == 1
            assert "go on with: the same launch of 2 processes (-m peagle_train.training " in out
    process = launched(recipe, "pair", *more)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert_equal(training, whole)
