"""The benchmark against a peer: its count of operations against a count one by one, and its workers."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle_train.errors import PeagleError
from peagle_train.head.attention import visible
from peagle_train.head.batch import PackedBatch, pack
from peagle_train.head.config import HeadConfig
from scripts.side_by_side.__main__ import SideProcess, _sizes
from scripts.side_by_side.case import Shape
from scripts.side_by_side.floor import operations
from tests.head.toys import CONFIG, toy_document

PEER = Path(__file__).parent.parent / ".venv-peer" / "bin" / "python"
TINY = Shape(
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=200,
    draft_vocab_size=50,
)
BATCHES = {
    "one document": [{}],
    "two turns": [dict(length=20, turns=((4, 9), (13, 20)))],
    "packed": [dict(seed=1), dict(seed=2, length=9, turns=((3, 9),)), dict(seed=3, length=11)],
    "no mask slot": [dict(positions=1)],
}


def one_by_one(config: HeadConfig, batch: PackedBatch) -> tuple[int, int]:
    """Linear and attention operations of the rows that the loss depends on, walking back from it."""
    document, anchor, depth = batch.document, batch.anchor, batch.depth
    seen = visible(
        document[:, None], anchor[:, None], depth[:, None], document[None], anchor[None], depth[None]
    )
    width, head_width = config.hidden_size, config.head_dim
    queries, key_values = config.num_attention_heads * head_width, config.num_key_value_heads * head_width

    def entering(rows: set[int], layer: int) -> int:
        """Distinct rows that enter the projections: in layer 0 all mask slots are one."""
        return len({row if layer or not depth[row] else -1 for row in rows})

    wanted = set(batch.supervised.tolist())
    multiplications = 3 * len(wanted) * width * config.draft_vocab_size
    positions = {(int(document[r]), int(batch.positions[r])) for r in wanted}
    multiplications += len(positions) * config.target_hidden_size * config.draft_vocab_size
    attention = 0
    for layer in reversed(range(config.num_layers)):
        keys = {int(key) for row in wanted for key in seen[row].nonzero()}
        inputs = width if layer else 2 * width
        multiplications += 3 * entering(wanted, layer) * inputs * queries
        multiplications += 3 * entering(keys, layer) * inputs * 2 * key_values
        multiplications += 3 * len(wanted) * (queries * width + 3 * width * config.intermediate_size)
        # In layer 0 the mask slots of one position ask one query, of each real slot once.
        pairs = set()
        for row in wanted:
            alike = layer == 0 and depth[row] > 0
            for key in seen[row].nonzero()[:, 0].tolist():
                once = alike and depth[key] == 0
                asking = (int(document[row]), int(batch.positions[row])) if once else row
                pairs.add((asking, key))
        attention += 7 * queries * len(pairs)
        wanted |= keys
    masks = any(bool(depth[row]) for row in wanted)
    multiplications += (2 * entering(wanted, 0) + masks) * config.aux_width * width
    return 2 * multiplications, 2 * attention


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("layers", [1, 2, 4])
@pytest.mark.parametrize("padding", [0, 7])
def test_operations_are_those_the_loss_depends_on(name: str, layers: int, padding: int) -> None:
    documents = [toy_document(**{"seed": 0, **changes}) for changes in BATCHES[name]]
    slots = pack(documents).num_slots
    batch = pack(documents, pad_slots_to=slots + padding)
    config = replace(CONFIG, num_layers=layers)
    counted = operations(config, batch)
    found = sum(counted.linear.values()), sum(counted.attention.values())
    assert found == one_by_one(config, batch)


def test_a_frozen_output_layer_wants_no_weight_gradient() -> None:
    batch = pack([toy_document(0)])
    trained, frozen = (operations(CONFIG, batch, train_output=t).linear["head"] for t in (True, False))
    assert frozen * 3 == trained * 2


def test_what_is_not_counted_is_refused() -> None:
    batch = pack([toy_document(0)])
    windows = replace(CONFIG, layer_types=("sliding_attention", "full_attention"), sliding_window=3)
    with pytest.raises(ValueError, match="not counted"):
        operations(windows, batch)


def run_worker(python: str, name: str) -> tuple[dict[str, Any], ...]:
    worker = SideProcess(python, name)
    try:
        built = worker.ask("build", shape=TINY.to_dict())
        return built, worker.ask("load", tokens=40), worker.ask("step", draw=1)
    finally:
        worker.close()


@pytest.mark.processes
def test_our_worker_measures_a_step() -> None:
    built, memory, step = run_worker(sys.executable, "ours")
    assert built["trained"]["embed_tokens.weight"] == TINY.vocab_size * TINY.hidden_size
    assert 0 <= memory["above_static"] < memory["process"]
    assert step["cpu_seconds"] > 0
    # 30 tokens of answer: 29 anchors, of the 28 with a mask slot depth d keeps floor(0.8 ** d * 28).
    assert step["outcome"]["elements"] == 29 + sum(int(0.8**d * 28) for d in range(1, TINY.positions))
    assert torch.isfinite(torch.tensor(step["outcome"]["loss"]))


def test_sizes_are_numbers_with_commas_between() -> None:
    assert _sizes("512, 1024,") == [512, 1024] and _sizes("") == []
    for text in ("abc", "512 1024", "1", "-5"):
        with pytest.raises(
            argparse.ArgumentTypeError, match="expected numbers of tokens with commas between"
        ):
            _sizes(text)


def test_a_worker_that_fails_is_reported(capfd: pytest.CaptureFixture[str]) -> None:
    worker = SideProcess(sys.executable, "nobody")
    try:
        with pytest.raises(PeagleError, match="nobody: ended with status 1 at step"):
            worker.ask("step", draw=0)
    finally:
        worker.close()
    assert "scripts.side_by_side.nobody" in capfd.readouterr().err


@pytest.mark.slow  # a minute: both sides import their libraries
@pytest.mark.skipif(not PEER.is_file(), reason="needs the peer's environment: make side-by-side makes it")
def test_the_peer_trains_as_many_parameters_on_as_many_elements() -> None:
    ours, theirs = run_worker(sys.executable, "ours"), run_worker(str(PEER), "peer")
    assert sum(ours[0]["trained"].values()) == sum(theirs[0]["trained"].values())
    assert ours[2]["outcome"]["elements"] == pytest.approx(theirs[2]["outcome"]["elements"], rel=0.1)
