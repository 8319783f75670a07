"""Which rows a step trains on, and which process takes them.

An epoch is one shuffle of all rows, packed into micro-batches of at most `batch_tokens` real slots. A step
takes the next accumulate * world micro-batches of it, so the last step of an epoch may have fewer:

    shuffle ── windows ── best fit ── shuffle ── steps of like micro-batches ── shuffle ── processes
    rows       of rows    in each     micro-     (a process waits for the                  of equal
                          window      batches    slowest of them)                          cost

Packing a window of rows, not all of them, costs two or three slots in a hundred and keeps the company of a
row random. All of it is a pure function of (lengths, seed, epoch, batch_tokens, accumulate, world), so
the data position of a resumed run is its step number; no row is dropped or repeated within an epoch. What
a step holds depends on the product accumulate * world alone: two processes train what one with twice
`accumulate` does.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeVar

import torch

from peagle_train.head.sampling import document_generator

T = TypeVar("T")

WINDOW_BATCHES = 32
"""Rows are packed in windows of about so many micro-batches."""

WINDOW_STEPS = 8
"""Micro-batches of like cost are put into one step within windows of so many steps."""

ATTENTION_EQUALS_REST_AT = 8192
"""Slots of a document at which attention costs as much as all else: about 12 H for causal attention, and
less in practice because attention runs at a lower rate. Only the balance between processes depends on it."""


@dataclass(frozen=True)
class Draw:
    """One row in one step: its place in the store and the shuffle (epoch) it belongs to."""

    row: int
    epoch: int


def cost(lengths: Sequence[int]) -> float:
    """What a micro-batch of documents with these numbers of slots costs, in slots of a short document.

    Attention grows with the square of a document's length, all else with the length.
    """
    return sum(n + n * n / ATTENTION_EQUALS_REST_AT for n in lengths)


class Stream:
    """The endless stream of epochs over `rows`.

    Args:
        rows: places in the store.
        lengths: real slots of each row.
        seed: of the shuffles.
        batch_tokens: most real slots of a micro-batch; a longer row takes one of its own.
        accumulate: micro-batches per step and process.
        world: processes.
    """

    def __init__(
        self,
        rows: Sequence[int],
        lengths: Sequence[int],
        seed: int,
        *,
        batch_tokens: int,
        accumulate: int = 1,
        world: int = 1,
    ):
        if not rows:
            raise ValueError("no training row carries a trainable chain")
        self.rows, self.lengths, self.seed = list(rows), dict(zip(rows, lengths, strict=True)), seed
        self.batch_tokens, self.accumulate, self.world = batch_tokens, accumulate, world
        self._ends: list[int] = []  # steps up to the end of every epoch counted so far
        self._epochs: dict[int, list[list[list[int]]]] = {}  # this one and the next, which is looked into

    @property
    def longest(self) -> int:
        """No micro-batch has more real slots than this."""
        lengths = self.lengths.values()
        return max(max(lengths), min(self.batch_tokens, sum(lengths)))

    def locate(self, step: int) -> tuple[int, int]:
        """(epoch, step within it) of a step."""
        while not self._ends or step >= self._ends[-1]:
            epoch = len(self._ends)
            self._ends.append((self._ends[-1] if self._ends else 0) + len(self.epoch(epoch)))
        epoch = bisect_left(self._ends, step + 1)
        return epoch, step - (self._ends[epoch - 1] if epoch else 0)

    def step(self, step: int, rank: int = 0) -> list[list[Draw]]:
        """The micro-batches of one process in one step.

        Every process gets the same number of them, 1 to `accumulate`; where the epoch's last step has too
        few to go round, the last one of a process is empty.
        """
        epoch, place = self.locate(step)
        mine = share(self.epoch(epoch)[place], self.lengths, self.world)[rank]
        return [[Draw(row, epoch) for row in batch] for batch in mine]

    def epoch(self, epoch: int) -> list[list[list[int]]]:
        """Rows of every micro-batch of every step of an epoch, before processes share them."""
        if epoch not in self._epochs:
            generator = document_generator(self.seed, epoch, -1)
            order = _shuffled(self.rows, generator)
            batches = _shuffled(pack_rows(order, self.lengths, self.batch_tokens), generator)
            size = self.accumulate * self.world
            steps = _alike(batches, self.lengths, size)
            whole, rest = [s for s in steps if len(s) == size], [s for s in steps if len(s) < size]
            self._epochs = dict(list(self._epochs.items())[-1:])
            self._epochs[epoch] = _shuffled(whole, generator) + rest
        return self._epochs[epoch]

    def describe(self) -> str:
        """What packing came to in the first epoch, for people to read."""
        batches = [batch for step in self.epoch(0) for batch in step]
        slots = sum(self.lengths.values())
        longer = sum(n > self.batch_tokens for n in self.lengths.values())
        alone = (
            f"; {longer:,} rows are longer than train.batch_tokens and take a micro-batch of their own"
            if longer
            else ""
        )
        return (
            f"packing: {len(self.rows):,} rows of {slots:,} slots in {len(batches):,} micro-batches of at "
            f"most {self.batch_tokens:,}, {100 * self.fill():.0f} % full; an epoch is "
            f"{len(self.epoch(0)):,} steps{alone}"
        )

    def fill(self) -> float:
        """Share of the slots of the first epoch's micro-batches that is used; longer rows count as full."""
        batches = [batch for step in self.epoch(0) for batch in step]
        used = [min(self.batch_tokens, sum(self.lengths[row] for row in batch)) for batch in batches]
        return sum(used) / (self.batch_tokens * len(batches))


def pack_rows(order: Sequence[int], lengths: dict[int, int], budget: int) -> list[list[int]]:
    """Micro-batches of at most `budget` slots over all rows of `order`, packed window by window."""
    batches: list[list[int]] = []
    window: list[int] = []
    slots = 0
    for place, row in enumerate(order, start=1):
        window.append(row)
        slots += lengths[row]
        if slots >= WINDOW_BATCHES * budget or place == len(order):
            batches += _best_fit(window, lengths, budget)
            window, slots = [], 0
    return batches


def in_order(rows: Sequence[int], lengths: Sequence[int], budget: int) -> list[list[int]]:
    """Micro-batches of neighbours: for measuring, where the order is free and nothing is drawn."""
    batches: list[list[int]] = []
    room = 0
    for row, length in zip(rows, lengths, strict=True):
        if not batches or length > room:
            batches.append([])
            room = budget
        batches[-1].append(row)
        room -= length
    return batches


def share(step: list[list[int]], lengths: dict[int, int], world: int) -> list[list[list[int]]]:
    """The micro-batches of a step by process, of about equal cost each, the dearest first in every process.

    The same number for every process: collectives count calls. Empty ones fill up.
    """
    each = -(-len(step) // world)
    costs = [(cost([lengths[row] for row in batch]), place) for place, batch in enumerate(step)]
    shares: list[list[list[int]]] = [[] for _ in range(world)]
    sums = [0.0] * world
    for value, place in sorted(costs, key=lambda c: (-c[0], c[1])):
        rank = min((r for r in range(world) if len(shares[r]) < each), key=lambda r: (sums[r], r))
        shares[rank].append(step[place])
        sums[rank] += value
    return [mine + [[] for _ in range(each - len(mine))] for mine in shares]


def _best_fit(window: Sequence[int], lengths: dict[int, int], budget: int) -> list[list[int]]:
    """Longest first, each into the fullest micro-batch that still has room."""
    batches: list[list[int]] = []
    rooms: list[tuple[int, int]] = []  # (slots left, micro-batch), rising
    for row in sorted(window, key=lambda r: -lengths[r]):  # stable: equal lengths stay shuffled
        length = lengths[row]
        at = bisect_left(rooms, (length, -1))
        if at == len(rooms):
            batches.append([])
            room, batch = budget, len(batches) - 1
        else:
            room, batch = rooms.pop(at)
        batches[batch].append(row)
        if room > length:
            insort(rooms, (room - length, batch))
    return batches


def _alike(batches: list[list[int]], lengths: dict[int, int], size: int) -> list[list[list[int]]]:
    """Steps of `size` micro-batches of like cost; the last one takes what is left."""
    steps = []
    window = size if size == 1 else size * WINDOW_STEPS
    for start in range(0, len(batches), window):
        ranked = sorted(batches[start : start + window], key=lambda b: -cost([lengths[row] for row in b]))
        steps += [ranked[i : i + size] for i in range(0, len(ranked), size)]
    return steps


def _shuffled(items: Sequence[T], generator: torch.Generator) -> list[T]:
    return [items[i] for i in torch.randperm(len(items), generator=generator).tolist()]
