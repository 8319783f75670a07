"""The training stage in a process of its own, to be killed, stopped and compared."""

from __future__ import annotations

import os
import shutil
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState, PartialState
from rich.console import Console
from safetensors.torch import load_file

from peagle_train import Run
from peagle_train.errors import PeagleError
from peagle_train.stages import StageResult
from peagle_train.training.checkpoint import checkpoints
from peagle_train.training.stage import train
from tests.training.test_loop import log_of


def linked(recipe: Path, name: str) -> Path:
    """The training folder of a run `name` that reads the states of the run `base`."""
    runs = recipe.parent / "runs"
    (runs / name).mkdir()
    for stage in ("answers", "states"):
        (runs / name / stage).symlink_to(Path("..") / "base" / stage)
    return runs / name / "training"


def train_here(
    recipe: Path, name: str, *overrides: str, console: Console | None = None, anew: bool = False
) -> StageResult:
    AcceleratorState._reset_state()
    PartialState._reset_state()
    with Run.open(recipe, [f"name={name}", *overrides], command=("peagle", "train")) as run:
        return train(run, console or Console(quiet=True), anew=anew)


def start(recipe: Path, name: str, *overrides: str, sabotage: Callable[[], None] | None = None) -> int:
    """Trains in a forked process; returns its id. sabotage: run there first."""
    pid = os.fork()
    if pid:
        return pid
    code = 99
    try:
        if sabotage is not None:
            sabotage()
        train_here(recipe, name, *overrides)
        code = 0
    except PeagleError as error:
        print(error, file=sys.stderr, flush=True)
        code = error.exit_code
    except BaseException:  # noqa: BLE001 - nothing may go on with the tests of the parent
        traceback.print_exc()
    finally:
        os._exit(code)


def end_of(pid: int) -> int:
    """Waits for a process; its exit code, negative for the signal that ended it."""
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def everything(training: Path) -> dict[str, Any]:
    """What two equal trainings have in common: weights, moments, the best head, the log, the standing."""
    from peagle_train.files import read_json

    last = checkpoints(training / "checkpoints")[-1]
    tensors = {
        f"{folder.name}/{file.name}/{name}": tensor
        for folder in (last, training / "best")
        for file in sorted(folder.glob("*.safetensors"))
        for name, tensor in load_file(file).items()
    }
    state = {
        k: v for k, v in read_json(last / "state.json").items() if k not in ("seconds", "checksum", "files")
    }
    return {
        "log": log_of(training),
        "state": state,
        "best": read_json(training / "best" / "score.json"),
        **tensors,
    }


def assert_equal(training: Path, whole: Path) -> None:
    """Bit for bit."""
    ours, theirs = everything(training), everything(whole)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        if isinstance(value, torch.Tensor):
            assert value.dtype == theirs[name].dtype and torch.equal(value, theirs[name]), name
        else:
            assert value == theirs[name], name


def fresh(recipe: Path, name: str) -> Path:
    """As `linked`; what an earlier test left under the name is removed."""
    shutil.rmtree(recipe.parent / "runs" / name, ignore_errors=True)
    return linked(recipe, name)
