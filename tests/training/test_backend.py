"""The recipe's backend: chosen on the device, printed, kept in the checkpoint."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from rich.console import Console

from peagle_train.errors import PeagleError
from peagle_train.files import read_json
from peagle_train.training.checkpoint import checkpoints
from tests.training.runs import linked, train_here


def test_auto_is_settled_printed_and_kept(recipe: Path) -> None:
    directory, text = linked(recipe, "auto-backend"), io.StringIO()
    train_here(recipe, "auto-backend", "train.steps=1", console=Console(file=text, width=200))
    assert "attention: sdpa, tested on cpu in float32, prefixes by fused-cpu; not flash:" in text.getvalue()
    state = read_json(checkpoints(directory / "checkpoints")[-1] / "state.json")
    assert state["engine"]["backend"] == "sdpa"


@pytest.mark.parametrize(("name", "says"), [("flash", "NVIDIA GPUs"), ("flex", "no backward on CPU")])
def test_one_that_cannot_run_is_refused_before_the_first_step(recipe: Path, name: str, says: str) -> None:
    directory = linked(recipe, f"{name}-backend")
    with pytest.raises(PeagleError, match=says):
        train_here(recipe, f"{name}-backend", f"train.backend={name}")
    assert not checkpoints(directory / "checkpoints")
