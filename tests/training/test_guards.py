"""Steps unlike others, and rows that are not finite: named, with what was done."""

from __future__ import annotations

import io
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from peagle_train.errors import PeagleError
from peagle_train.head.batch import PackedBatch
from peagle_train.store.documents import Documents
from peagle_train.store.states import StateRow, StateStore, StateWriter
from peagle_train.training.checkpoint import checkpoints
from peagle_train.training.guards import LEAST, WINDOW, SpikeGuard
from peagle_train.training.module import DraftTraining
from tests.training.conftest import Made
from tests.training.runs import fresh, train_here
from tests.training.test_loop import log_of, make_loop, weights_of


def shown(steps: int, seed: int = 0) -> SpikeGuard:
    """A guard that has seen losses of 2 ± 0.1 and norms of 1 ± 0.1."""
    guard, draw = SpikeGuard(), random.Random(seed)
    for _ in range(steps):
        assert guard.judge(draw.gauss(2, 0.1), draw.gauss(1, 0.1)) == ""
    return guard


def test_usual_steps_are_not_spikes() -> None:
    for seed in range(20):
        shown(500, seed)
    falling = SpikeGuard()
    assert not any(falling.judge(10 * 0.99**step, 1.0) for step in range(500))
    constant = SpikeGuard()
    assert not any(constant.judge(2.0 + 1e-6 * (step % 2), 1.0) for step in range(500))


@pytest.mark.parametrize(
    ("loss", "norm", "found"),
    [
        (2.5, 1.0, ""),
        (3.5, 1.0, "loss 3.5 (usual "),
        (2.0, 9.0, ""),
        (2.0, 11.0, "gradient norm 11 (usual "),
        (float("nan"), 1.0, "loss nan, gradient norm 1.0: not finite"),
        (2.0, float("inf"), "loss 2.0, gradient norm inf: not finite"),
    ],
)
def test_what_a_spike_is(loss: float, norm: float, found: str) -> None:
    said = shown(200).judge(loss, norm)
    assert said.startswith(found) and bool(said) == bool(found)


def test_nothing_is_judged_before_there_are_enough_steps() -> None:
    assert shown(LEAST - 1).judge(100.0, 100.0) == ""
    assert shown(LEAST).judge(100.0, 100.0) != ""


def test_outliers_do_not_hide_the_next_and_a_new_level_becomes_usual() -> None:
    guard = shown(200)
    judged = [bool(guard.judge(8.0 + 0.01 * i, 1.0)) for i in range(WINDOW)]
    assert all(judged[:30]) and not any(judged[60:])


def test_the_state_survives_json() -> None:
    import json

    guard = shown(137)
    twin = SpikeGuard(json.loads(json.dumps(guard.state())))
    draw = random.Random(1)
    for _ in range(200):
        loss, norm = draw.expovariate(0.5), draw.expovariate(0.1)
        assert guard.judge(loss, norm) == twin.judge(loss, norm)
    assert guard.state() == twin.state()


SPIKED = 30
"""The step with a spike, counted from 1."""


def spiked_loop(made: Made, directory: Path, monkeypatch: pytest.MonkeyPatch, **changes: Any) -> Any:
    """A loop in whose 30th step one row costs fifty times what it should."""
    loop = make_loop(made, directory, **{"steps": 40, "checkpoint_every": 8, "validate_every": 40, **changes})
    loop.console = Console(file=io.StringIO(), width=2000)
    draws = [draw for part in loop.data.stream.step(SPIKED - 1) for draw in part]
    bad = (draws[-1].row, draws[-1].epoch)
    sampled, forward, mark = Documents.sampled, DraftTraining.forward, 12345.0

    def marked(self: Documents, row: int, epoch: int, **cod: Any) -> Any:
        document = sampled(self, row, epoch, **cod)
        return replace(document, last=document.last * 0 + mark) if (row, epoch) == bad else document

    def dear(self: DraftTraining, batch: PackedBatch) -> Any:
        sums = forward(self, batch)
        sums.loss = sums.loss * (50 if bool((batch.last == mark).any()) else 1)
        return sums

    monkeypatch.setattr(Documents, "sampled", marked)
    monkeypatch.setattr(DraftTraining, "forward", dear)
    return loop, bad[0], sorted(d.row for d in draws)


@pytest.mark.parametrize("action", ["warn", "skip"])
def test_a_spike_names_step_and_row_and_the_weights_follow_the_recipe(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, action: str
) -> None:
    loop, row, rows = spiked_loop(made, tmp_path, monkeypatch, on_spike=action, log_every=7)
    weights: dict[int, torch.Tensor] = {}
    step = loop._step

    def watch(number: int) -> dict[str, Any]:
        weights[number] = loop.head.lm_head.weight.detach().clone()
        return step(number)

    loop._step = watch
    loop.run()
    (record,) = (line for line in log_of(tmp_path) if "spike" in line)
    assert record["step"] == SPIKED  # though it is on no multiple of log_every
    assert record["spike"].startswith(("loss ", "gradient norm "))
    assert (
        f"Rows of the step: {rows}; worst: row {row} (train p{row}, batch-00000.safetensors)"
        in record["spike"]
    )
    assert record["spike"].endswith("Step skipped" if action == "skip" else "Step taken")
    assert f"step {SPIKED}: {record['spike']}" in loop.console.file.getvalue()
    same = torch.equal(weights[SPIKED - 1], weights[SPIKED])
    assert same == (action == "skip")


def test_a_skipped_step_is_skipped_again_after_a_kill(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spiked_loop(made, tmp_path / "whole", monkeypatch, on_spike="skip")[0].run()
    monkeypatch.undo()
    loop, *_ = spiked_loop(made, tmp_path / "killed", monkeypatch, on_spike="skip")
    step = loop._step
    loop._step = lambda number: step(number) if number < 28 else pytest.fail("killed")
    with pytest.raises(pytest.fail.Exception):
        loop.run()
    monkeypatch.undo()
    spiked_loop(made, tmp_path / "killed", monkeypatch, on_spike="skip")[0].run()
    assert log_of(tmp_path / "killed") == log_of(tmp_path / "whole")
    for name, tensor in weights_of(tmp_path / "whole").items():
        assert torch.equal(tensor, weights_of(tmp_path / "killed")[name]), name


def test_a_spike_stops_the_run_if_the_recipe_says_so(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, row, _ = spiked_loop(made, tmp_path, monkeypatch, on_spike="stop")
    with pytest.raises(
        PeagleError, match=rf"step {SPIKED}: .*step-000024.*worst: row {row} .*on_spike: skip"
    ):
        loop.run()
    assert checkpoints(tmp_path / "checkpoints")[-1].name == "step-000024"
    monkeypatch.undo()
    loop, *_ = spiked_loop(made, tmp_path, monkeypatch, on_spike="skip")
    assert loop.run().step == 40


def with_bad_rows(source: Path, harm: dict[int, float]) -> None:
    """Writes a store anew with one value of some rows replaced, past the writer's own check."""
    store = StateStore(source)
    rows = []
    for info in store.info():
        row = store.read(info.row)
        if info.row in harm:
            aux = row.aux.clone()
            aux[3, 5] = harm[info.row]
            row = StateRow(**{**row.__dict__, "aux": aux})
        rows.append(row)
    writer = StateWriter(source, store.fingerprint, store.aux_layers, store.hidden_size, store.dtype)
    writer._check = lambda row: None  # type: ignore[method-assign]
    for file in source.glob("batch-*"):
        file.unlink()
    writer.write_batch(0, rows)
    writer.seal()


@pytest.fixture
def bent(recipe: Path) -> tuple[Path, list[int]]:
    """The run `bent` with three rows that are not finite: NaN and Inf in training, NaN in validation."""
    training = fresh(recipe, "bent")
    states = training.parent / "states"
    states.unlink()
    shutil.copytree(recipe.parent / "runs" / "base" / "states", states)
    store = StateStore(states)
    train, held = store.info("train"), store.info("validation")
    bad = [train[1].row, train[4].row, held[0].row]
    with_bad_rows(states, dict(zip(bad, [float("nan"), float("-inf"), float("nan")], strict=True)))
    # The stage's record knows sizes; those of a store written by someone else.
    from peagle_train import stages
    from peagle_train.files import read_json, write_json

    record = read_json(states / "stage.json")
    write_json(states / "stage.json", {**record, "files": stages._sizes(states)})
    return training, bad


def test_rows_that_are_not_finite_are_refused_before_the_first_step(
    recipe: Path, bent: tuple[Path, list[int]]
) -> None:
    training, bad = bent
    message = (
        rf"batch-00000\.safetensors: row {bad[0]} \(train .+\): aux holds NaN or Inf at 1 of \d+ tokens, "
        r"first at token 3; .*peagle extract.*train\.skip_bad_rows=true"
    )
    with pytest.raises(PeagleError, match=message):
        train_here(recipe, "bent")
    assert not (training / "log.jsonl").exists()


def test_rows_that_are_not_finite_are_left_out_by_name(recipe: Path, bent: tuple[Path, list[int]]) -> None:
    training, bad = bent
    console = Console(file=io.StringIO(), width=300)
    result = train_here(recipe, "bent", "train.skip_bad_rows=true", console=console)
    said = console.file.getvalue()
    assert [f"row {row} (" in said for row in bad] == [True] * 3 and said.count("left out: ") == 3
    assert "on 6 rows" in result.message
    assert all(line["loss"] < 1e3 for line in log_of(training) if "loss" in line)
