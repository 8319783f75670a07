"""Rows of a states store as the head sees them: tensors, and how deep each chain is kept."""

from __future__ import annotations

from collections.abc import Sequence

from peagle_train.head.alignment import needed_states, trainable_depths
from peagle_train.head.batch import Document
from peagle_train.head.sampling import document_generator, full_depths, sample_depths
from peagle_train.store.source import StatesSource


class Documents:
    """Documents of a store for K = `positions`."""

    def __init__(self, store: StatesSource, positions: int):
        self.store, self.positions = store, positions

    def sampled(self, row_index: int, epoch: int, *, seed: int, rate: float, floor: float) -> Document:
        """A row with the COD draw of one epoch."""
        row = self.store.read(row_index)
        generator = document_generator(seed, epoch, row_index)
        kept = sample_depths(trainable_depths(row.loss_mask), self.positions, rate, floor, generator)
        return Document(row.token_ids, row.aux, row.last, kept, row.last_at)

    def full(self, row_index: int) -> Document:
        """A row with all its trainable chains: for validation and evaluation."""
        row = self.store.read(row_index)
        kept = full_depths(trainable_depths(row.loss_mask), self.positions)
        return Document(row.token_ids, row.aux, row.last, kept, row.last_at)


def trainable_rows(store: StatesSource, set_name: str) -> list[int]:
    """Rows of a set with at least one trainable chain: a generated token after the first of its turn."""
    rows = [info.row for info in store.info(set_name) if info.supervised > 1]
    return [row for row, slots in zip(rows, slot_counts(store, rows), strict=True) if slots]


def slot_counts(store: StatesSource, rows: Sequence[int]) -> list[int]:
    """Real slots of each row, up to its last trainable anchor (0: none); read without hidden states."""
    return [needed_states(store.loss_mask(row))[0] for row in rows]
