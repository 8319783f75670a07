"""The loop: it learns, repeats itself, and stops before it does harm."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from rich.console import Console

from peagle_train.errors import PeagleError
from peagle_train.files import read_json
from peagle_train.head.acceptance import offline_acceptance, total
from peagle_train.head.io import load_head
from peagle_train.recipe.schema import CodSection, HeadSection, TrainSection
from peagle_train.store.documents import Documents, slot_counts, trainable_rows
from peagle_train.training import checkpoint
from peagle_train.training.data import Stream
from peagle_train.training.loop import Loop, TrainingSet
from peagle_train.training.module import DraftTraining
from peagle_train.training.start import make_start
from tests.training.conftest import AUX_LAYERS, Made

HEAD = HeadSection(
    layers=1, aux_layers=AUX_LAYERS, mask_token="unused", draft_vocab_size=60, embeddings="shared"
)
EAGLE3_HEAD = HEAD.model_copy(update={"mask_token": None})
BASE: dict[str, Any] = {
    "positions": 4,
    "cod": CodSection(rate=0.8),
    "steps": 12,
    "batch_tokens": 128,
    "learning_rate": 2e-3,
    "precision": "fp32",
    "log_every": 1,
    "validate_every": 6,
    "checkpoint_every": 4,
}


def make_loop(made: Made, directory: Path, head: HeadSection = HEAD, seed: int = 0, **changes: Any) -> Loop:
    from types import SimpleNamespace

    AcceleratorState._reset_state()
    PartialState._reset_state()
    section = TrainSection(**{**BASE, **changes})
    method = "eagle3" if head.mask_token is None else "peagle"
    recipe = SimpleNamespace(head=head, train=section, seed=seed, method=method)
    rows = trainable_rows(made.store, "train")
    directory.mkdir(parents=True, exist_ok=True)
    console = Console(quiet=True)
    start = make_start(recipe, made.target, made.store, rows, directory, console)  # type: ignore[arg-type]
    module = DraftTraining(start.head, start.target_output, section.positions, section.loss)
    accelerator = Accelerator(cpu=True)
    data = TrainingSet(
        Documents(made.store, section.positions),
        Stream(
            rows,
            slot_counts(made.store, rows),
            seed,
            batch_tokens=section.batch_tokens,
            accumulate=section.accumulate,
        ),
        trainable_rows(made.store, "validation"),
    )
    return Loop(accelerator, module, data, section, seed=seed, directory=directory, console=console)


def log_of(directory: Path) -> list[dict[str, Any]]:
    lines = [json.loads(line) for line in (directory / "log.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def weights_of(directory: Path) -> dict[str, torch.Tensor]:
    return load_head(checkpoint.checkpoints(directory / "checkpoints")[-1]).state_dict()


@pytest.mark.parametrize(("head", "rate"), [(HEAD, 0.8), (EAGLE3_HEAD, 1.0)], ids=["peagle", "eagle3"])
def test_it_learns(made: Made, tmp_path: Path, head: HeadSection, rate: float) -> None:
    loop = make_loop(
        made, tmp_path, head, steps=60, checkpoint_every=60, validate_every=20, cod=CodSection(rate=rate)
    )
    before = accepted_in_training(loop)
    standing = loop.run()
    log = log_of(tmp_path)
    losses = [line["loss"] for line in log if "loss" in line]
    scores = [line["validation"]["acceptance_length"] for line in log if "validation" in line]
    assert sum(losses[-5:]) < 0.6 * sum(losses[:5])
    assert accepted_in_training(loop) > before + 0.05
    # The answers are random text: nothing learned from some of them helps on others.
    assert standing.best_acceptance == pytest.approx(max(scores), abs=1e-4)
    assert read_json(tmp_path / "best" / "score.json")["step"] == standing.best_step


def accepted_in_training(loop: Loop) -> float:
    """Acceptance length on the rows that are trained on."""
    rows, k = loop.data.stream.rows, loop.section.positions
    documents = [loop.data.documents.full(row) for row in rows]
    return total(offline_acceptance(loop.head, documents, k), k).acceptance_length


def test_the_same_seed_gives_the_same_numbers_and_another_seed_others(made: Made, tmp_path: Path) -> None:
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        make_loop(made, tmp_path / name, seed=seed).run()
    assert log_of(tmp_path / "a") == log_of(tmp_path / "b")
    assert log_of(tmp_path / "a") != log_of(tmp_path / "c")


def test_micro_batches_equal_one_batch(made: Made, tmp_path: Path) -> None:
    make_loop(made, tmp_path / "one", steps=4, batch_tokens=1000, accumulate=1).run()
    make_loop(made, tmp_path / "two", steps=4, batch_tokens=40, accumulate=24).run()
    for a, b in zip(log_of(tmp_path / "one"), log_of(tmp_path / "two"), strict=True):
        if "loss" in a:
            assert a["loss"] == pytest.approx(b["loss"], rel=1e-5)
            assert a["elements"] == b["elements"] and a["tokens"] == b["tokens"]


def test_a_loss_that_is_not_finite_stops_the_run_and_leaves_the_best_head(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop = make_loop(made, tmp_path)
    forward = DraftTraining.forward
    calls = 0

    def explode(self: DraftTraining, batch: Any) -> Any:
        nonlocal calls
        calls += 1
        sums = forward(self, batch)
        sums.loss = sums.loss * (float("nan") if calls == 6 else 1.0)
        return sums

    monkeypatch.setattr(DraftTraining, "forward", explode)
    with pytest.raises(PeagleError, match=r"step 6: loss nan.*step-000004.*Rows of the step"):
        loop.run()
    assert all(bool(torch.isfinite(p).all()) for p in loop.head.parameters())
    assert all(bool(torch.isfinite(p).all()) for p in load_head(tmp_path / "best").parameters())


@pytest.mark.parametrize("head", [HEAD, EAGLE3_HEAD], ids=["peagle", "eagle3"])
def test_bfloat16_keeps_float32_masters_and_moves_norms(
    made: Made, tmp_path: Path, head: HeadSection
) -> None:
    loop = make_loop(made, tmp_path, head, precision="bf16")
    before = loop.head.norm.weight.clone()
    loop.run()
    assert all(p.dtype == torch.float32 for p in loop.head.parameters())
    assert not torch.equal(before, loop.head.norm.weight)
    assert all(line["loss"] > 0 for line in log_of(tmp_path) if "loss" in line)


def test_cross_entropy_and_own_embeddings(made: Made, tmp_path: Path) -> None:
    head = HEAD.model_copy(update={"embeddings": "own", "draft_vocab_size": None})
    loop = make_loop(made, tmp_path, head=head, loss="ce", weight_decay=0.01)
    before = loop.head.embed_tokens.weight.detach().clone()
    loop.run()
    assert not torch.equal(before, loop.head.embed_tokens.weight)
    assert loop.head.d2t is None


@pytest.mark.parametrize("head", [HEAD, EAGLE3_HEAD], ids=["peagle", "eagle3"])
@pytest.mark.parametrize("output", ["frozen", "trained"])
def test_a_frozen_output_matrix_stays_the_targets(
    made: Made, tmp_path: Path, output: str, head: HeadSection
) -> None:
    loop = make_loop(made, tmp_path, head=head.model_copy(update={"output": output}))
    norm = loop.head.norm.weight.detach().clone()
    loop.run()
    rows = made.target.head_table()[loop.head.draft_token_ids]
    assert torch.equal(loop.head.lm_head.weight, rows) is (output == "frozen")
    assert torch.equal(load_head(tmp_path / "best").lm_head.weight, rows) is (output == "frozen")
    assert not torch.equal(norm, loop.head.norm.weight)


def test_shared_embeddings_and_the_map_do_not_move(made: Made, tmp_path: Path) -> None:
    loop = make_loop(made, tmp_path)
    table, ids = loop.head.embed_tokens.weight.clone(), loop.head.draft_token_ids.clone()
    mask = loop.head.mask_hidden.detach().clone()
    loop.run()
    assert torch.equal(table, loop.head.embed_tokens.weight) and torch.equal(ids, loop.head.draft_token_ids)
    assert not torch.equal(mask, loop.head.mask_hidden)
    assert loop.head.config.mask_token_id not in ids.tolist()
    assert set(made.target.end_token_ids) <= set(ids.tolist())
