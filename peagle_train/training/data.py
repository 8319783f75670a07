"""Which rows a step trains on.

The training set is read as one endless stream: a shuffle of all rows, then another, and so on. Step s
takes the next `rows` of it. Both are pure functions of (seed, step), so the data position of a resumed
run is its step number, no row is dropped or repeated within a shuffle, and processes share a step by
taking every world-th row of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from peagle_train.head.alignment import trainable_depths
from peagle_train.head.batch import Document
from peagle_train.head.sampling import document_generator, full_depths, sample_depths
from peagle_train.store.states import StateStore


@dataclass(frozen=True)
class Draw:
    """One row in one step: its place in the store and the shuffle (epoch) it belongs to."""

    row: int
    epoch: int


class Stream:
    """The endless stream of shuffles over `rows`."""

    def __init__(self, rows: Sequence[int], seed: int):
        if not rows:
            raise ValueError("no training row carries a trainable chain")
        self.rows, self.seed = list(rows), seed
        self._epoch = -1
        self._order: list[int] = []

    def at(self, index: int) -> Draw:
        """The draw at a place of the stream."""
        epoch, place = divmod(index, len(self.rows))
        if epoch != self._epoch:
            generator = document_generator(self.seed, epoch, -1)
            self._epoch = epoch
            self._order = torch.randperm(len(self.rows), generator=generator).tolist()
        return Draw(self.rows[self._order[place]], epoch)

    def step(self, step: int, rows: int, rank: int = 0, world: int = 1) -> list[Draw]:
        """The draws of one process in one step; `rows` counts those of all processes."""
        start = step * rows
        return [self.at(i) for i in range(start + rank, start + rows, world)]


class Documents:
    """Rows of a store as the head sees them."""

    def __init__(self, store: StateStore, positions: int):
        self.store, self.positions = store, positions

    def sampled(self, draw: Draw, *, seed: int, rate: float, floor: float) -> Document:
        """A row with the COD draw of its epoch."""
        row = self.store.read(draw.row)
        generator = document_generator(seed, draw.epoch, draw.row)
        kept = sample_depths(trainable_depths(row.loss_mask), self.positions, rate, floor, generator)
        return Document(row.token_ids, row.aux, row.last, kept)

    def full(self, row_index: int) -> Document:
        """A row with all its trainable chains: for validation."""
        row = self.store.read(row_index)
        kept = full_depths(trainable_depths(row.loss_mask), self.positions)
        return Document(row.token_ids, row.aux, row.last, kept)


def trainable_rows(store: StateStore, set_name: str) -> list[int]:
    """Rows of a set with at least one trainable chain: a generated token after the first of its turn."""
    return [
        info.row
        for info in store.info(set_name)
        if info.supervised > 1 and bool(trainable_depths(store.read(info.row).loss_mask).any())
    ]
