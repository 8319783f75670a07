"""The training stage of `peagle run` under a launch file of accelerate: a process on every GPU.

    peagle run ──► accelerate launch --config_file FILE --num_processes GPUs -m peagle_train.training RECIPE
       │ lends the run's folder, waits, passes SIGINT and SIGTERM on
       ◄── exit code; the folder's record says what was done

A launch that cannot be is refused before hours of answers are spent: `require_launch` is asked first.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich.console import Console

from peagle_train.errors import PeagleError
from peagle_train.recipe import Recipe
from peagle_train.run import Run
from peagle_train.stages import StageResult, read_record

LAUNCHER = (sys.executable, "-m", "accelerate.commands.launch")
STOPS = (signal.SIGTERM, signal.SIGINT)


class LaunchError(PeagleError):
    """The launched training ended with an error, which it has told. Leaves with its exit code."""

    def __init__(self, message: str, exit_code: int):
        super().__init__(message)
        self.exit_code = exit_code


def gpus() -> int:
    """GPUs of this machine."""
    import torch

    return torch.accelerator.device_count() if torch.accelerator.is_available() else 0


def processes_for(recipe: Recipe, gpus: int) -> int:
    """Processes of a training on this machine: one a GPU, those left out that a target beside it takes.

    With target.device cuda:N the target of process R runs on GPU N + R.
    """
    _, _, first = recipe.target.device.partition(":")
    if recipe.states.mode == "stored" or not first or int(first) == 0:
        return gpus
    return max(1, min(int(first), gpus - int(first)))


def launch_here(run: Run, console: Console) -> Path | None:
    """The launch file to train with on this machine; None: one process, this one.

    Raises PeagleError for a launch file that is not there, or that starts several machines.
    """
    named, device = run.recipe.train.launch, run.recipe.target.device
    if named is None:
        return None
    from peagle_train.planning.ranks import read_launch

    launch = read_launch(Path(named))
    if launch.machines > 1:
        raise PeagleError(
            f"train.launch: {named} starts {launch.machines} machines; `peagle run` is one of them; "
            "leave it out (`train.launch=`) and train with `sbatch scripts/train.slurm RECIPE`, or by hand "
            "as docs/launching.md tells"
        )
    if device == "cpu" or not gpus():
        why = "target.device is cpu" if device == "cpu" else "there is no GPU here"
        console.print(
            f"train.launch: {named} is for GPUs, and {why}: training in one process",
            highlight=False,
            markup=False,
            soft_wrap=True,
        )
        return None
    return launch.file


def train_launched(run: Run, file: Path, console: Console) -> StageResult:
    """Trains under a launch file, on all GPUs of this machine.

    Raises:
        LaunchError: the training ended with an error, or was stopped by a signal.
        PeagleError: it ended well and left no finished training.
    """
    before = read_record(run.training_dir)
    arguments = ["--config_file", str(file), "--num_processes", str(processes_for(run.recipe, gpus()))]
    command = [*LAUNCHER, *arguments, "-m", "peagle_train.training", run.source, *run.overrides]
    console.print(f"launching: {' '.join(command[2:])}", markup=False, highlight=False, soft_wrap=True)
    with run.lent():
        _call(command)
    record = read_record(run.training_dir)
    if record is None or record.finished is None:
        raise PeagleError(
            f"{run.training_dir}: the launched training ended without an error and without a result; run "
            f"`{run.command_for('train')}` to see why"
        )
    skipped = before is not None and before.finished == record.finished
    message = f"{run.training_dir}: {'already there' if skipped else 'trained'} under {file}"
    return StageResult(record.stage, record.seconds or 0.0, skipped, message)


def _call(command: Sequence[str]) -> None:
    """Runs a launcher to its end. A group of its own: launchers do not all pass signals on."""
    with (
        subprocess.Popen(command, start_new_session=True) as process,
        _passed_on(process) as heard,
    ):
        code = process.wait()
    if code == 0 and not heard:
        return
    number = heard[0] if heard else -code if code < 0 else 0
    if number:
        name = signal.Signals(number).name
        raise LaunchError(
            f"train: ended by {name}; what was saved is kept, and the same command goes on", 128 + number
        )
    raise LaunchError(
        f"train: the launched training ended with exit code {code}; the lines above tell why. The same "
        "command goes on from what was saved",
        code,
    )


@contextmanager
def _passed_on(process: subprocess.Popen[Any]) -> Iterator[list[int]]:
    """For the block, signals that ask this process to stop go to the launched one's group; yields them."""
    heard: list[int] = []

    def pass_on(number: int, _: Any) -> None:
        heard.append(number)
        if process.poll() is None:
            os.killpg(process.pid, number)

    before = {stop: signal.signal(stop, pass_on) for stop in STOPS}
    try:
        yield heard
    finally:
        for stop, handler in before.items():
            signal.signal(stop, handler)
