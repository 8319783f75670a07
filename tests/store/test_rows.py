"""What is kept of a row: all that a training or an evaluation reads of it, and nothing else."""

from __future__ import annotations

from dataclasses import fields, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from peagle_train.head.alignment import needed_states, trainable_depths
from peagle_train.head.batch import Document, PackedBatch, pack
from peagle_train.head.sampling import full_depths
from peagle_train.store import StateRow, StateStore, stored_bytes, stored_bytes_at_most
from peagle_train.store.documents import Documents
from peagle_train.store.format import spans_of
from peagle_train.store.rows import cut_row
from tests.store.rows import AUX, HIDDEN, row, writer

N = 14
SPANS = [
    [[5, 10]],
    [[5, N]],
    [[2, 5], [8, 12]],
    [[1, 3], [4, 5], [6, 8], [13, 14]],
    [[3, 4]],
    [[1, N]],
    [[N - 1, N]],
]


def elements(mask: Tensor) -> list[tuple[int, int]]:
    """(anchor, depth) by the words: x[a+1] and the label x[a+2+d] are generated in one turn."""
    n = len(mask)
    return [
        (a, d) for a in range(n) for d in range(n) if a + 2 + d < n and bool(mask[a + 1 : a + 3 + d].all())
    ]


@pytest.mark.parametrize("spans", SPANS)
def test_kept_is_what_the_definition_of_an_element_reads(spans: list[list[int]]) -> None:
    mask = row(0, N, spans=spans).loss_mask
    found = elements(mask)
    slots, outputs = needed_states(mask)
    assert outputs.tolist() == sorted({a + d + 1 for a, d in found})
    assert slots == max((a + 1 for a, _ in found), default=0)
    assert spans_of(mask) == spans


def test_kept_of_random_masks_is_what_the_definition_reads() -> None:
    generator = torch.Generator().manual_seed(0)
    for _ in range(100):
        mask = torch.rand(N, generator=generator) < 0.6
        assert needed_states(mask)[1].tolist() == sorted({a + d + 1 for a, d in elements(mask)})


def packed(made: StateRow) -> PackedBatch:
    kept = full_depths(trainable_depths(made.loss_mask), N)
    return pack([Document(made.token_ids, made.aux, made.last, kept, made.last_at)])


@pytest.mark.parametrize("spans", [spans for spans in SPANS if elements(row(0, N, spans=spans).loss_mask)])
def test_a_batch_of_what_is_kept_is_the_batch_of_everything(spans: list[list[int]], tmp_path: Path) -> None:
    whole = row(0, N, spans=spans)
    build = writer(tmp_path)
    build.write_batch(0, [whole])
    build.seal()
    expected, found = packed(whole), pack([Documents(StateStore(tmp_path), N).full(0)])
    for name in (field.name for field in fields(PackedBatch) if field.name != "chains"):
        one, two = getattr(expected, name), getattr(found, name)
        assert torch.equal(one, two) if isinstance(one, Tensor) else one == two, name
    # And every row that is kept is in it: a mark on any of them shows.
    stored = cut_row(whole)
    for name in ("aux", "last"):
        states = getattr(stored, name)
        for position in range(len(states)):
            marked = states.clone()
            marked[position, 0] = 7e7
            batch = packed(replace(stored, **{name: marked}))
            assert bool((getattr(batch, name) == 7e7).any()), f"{name}[{position}] is read by nobody"


def test_a_needed_state_that_is_missing_is_noticed() -> None:
    stored = cut_row(row(0, N, spans=[[2, 5], [8, 12]]))
    assert stored.last_at is not None
    for missing in range(len(stored.last_at)):
        rest = torch.arange(len(stored.last_at)) != missing
        position = int(stored.last_at[missing])
        with pytest.raises(ValueError, match=rf"no state of the positions \[{position}\]"):
            packed(replace(stored, last=stored.last[rest], last_at=stored.last_at[rest]))
    with pytest.raises(ValueError, match=r"aux has 9 states, expected 10"):
        packed(replace(stored, aux=stored.aux[:-1]))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_estimate_is_what_the_rows_take_to_the_byte(tmp_path: Path, dtype: str) -> None:
    build = writer(tmp_path, dtype=dtype)
    rows = [row(index, N, spans=spans) for index, spans in enumerate(SPANS)]
    build.write_batch(0, rows)
    files = [tmp_path / f"batch-00000.{name}" for name in ("safetensors", "tokens.safetensors")]
    headers = [8 + int.from_bytes(path.read_bytes()[:8], "little") for path in files]
    data = sum(path.stat().st_size for path in files) - sum(headers)
    assert data == sum(stored_bytes(made.loss_mask, len(AUX), HIDDEN, dtype) for made in rows)


def test_the_estimate_before_the_answers_is_exact_for_one_turn_and_a_bound_for_more() -> None:
    for spans in SPANS:
        mask = row(0, N, spans=spans).loss_mask
        exact = stored_bytes(mask, len(AUX), HIDDEN, "bfloat16")
        bound = stored_bytes_at_most(N, int(mask.sum()), len(AUX), HIDDEN, "bfloat16")
        assert exact == bound if len(spans) == 1 and spans[0][1] == N else exact <= bound
        assert bound <= stored_bytes_at_most(N + 1, int(mask.sum()) + 1, len(AUX), HIDDEN, "bfloat16")
