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

from peagle_train.head.sampling import document_generator


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
