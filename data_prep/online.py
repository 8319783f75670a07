"""Online states: the target runs in the training process itself, and nothing is stored.

    upcoming(rows of step s) ──► micro-batches of like length ──► the target ──► read by step s, forgotten

On the device of the head the target's passes come between the steps. On a device of its own (target.device:
cuda:N) a thread makes the next micro-batches while the head learns from those before.
"""

from __future__ import annotations

import os
from collections import defaultdict, deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch
from rich.console import Console

from data_prep.making import AnsweredRows, MadeStates, Maker, cut
from peagle_train.recipe.schema import TargetSection
from peagle_train.run import Run
from peagle_train.store.answers import AnswerStore
from peagle_train.store.states import StateRow, require_finite
from peagle_train.target.adapter import Target
from peagle_train.target.source import obtain

AHEAD = 2
"""Micro-batches made before they are asked for, by a target with a device of its own."""


@dataclass
class _MicroBatch:
    rows: list[int]
    made: Future[list[StateRow]] | None = None


class OnlineStates(MadeStates):
    """States of answered rows, made as they are asked for: a `StatesSource`.

    Args:
        maker: with the target in it.
        batch_tokens: most tokens of one pass, padding counted.
        fingerprint: of what the states are made from.
        ahead: micro-batches that a thread makes before they are asked for; 0: none. What is made is the same.
    """

    def __init__(self, maker: Maker, batch_tokens: int, fingerprint: str, ahead: int = 0):
        super().__init__(maker.rows, maker.aux_layers, maker.hidden_size, maker.dtype, fingerprint)
        self._maker, self._budget, self._ahead = maker, batch_tokens, ahead
        self._queue: deque[_MicroBatch] = deque()
        self._ready: dict[int, deque[StateRow]] = defaultdict(deque)
        self._thread = ThreadPoolExecutor(1, "target") if ahead else None

    def upcoming(self, rows: Sequence[int]) -> None:
        """Told ahead which rows will be read next; those told together are made together."""
        self._queue += [_MicroBatch(batch) for batch in cut(self._rows, rows, self._budget)]
        self._begin()

    def read(self, row: int) -> StateRow:
        """One row with its states, which are then forgotten here.

        Raises PeagleError for an unknown index, NotFiniteError for states that hold NaN or Inf.
        """
        if not self._ready[row]:
            batch = next((batch for batch in self._queue if row in batch.rows), None)
            if batch is None:
                batch = _MicroBatch([row])
            else:
                self._queue.remove(batch)
            for state in self._made(batch):
                self._ready[state.row].append(state)
            self._begin()
        return require_finite(self._ready[row].popleft(), f"row {row} of {self._rows.directory}")

    def close(self) -> None:
        """Nothing is made ahead any more."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)

    def _made(self, batch: _MicroBatch) -> list[StateRow]:
        """Where there is a thread, it alone runs the target: two passes at a time would mix their taps."""
        if self._thread is None:
            return self._maker.made(batch.rows)
        made = batch.made or self._thread.submit(self._maker.made, batch.rows)
        return made.result()

    def _begin(self) -> None:
        if self._thread is None:
            return
        for batch in list(self._queue)[: self._ahead]:
            if batch.made is None:
                batch.made = self._thread.submit(self._maker.made, batch.rows)


def open_online(run: Run, fingerprint: str, console: Console, target: Target | None = None) -> OnlineStates:
    """The online states of a run. target: left out, it is loaded, on this process's device.

    Raises PeagleError: no finished answers, no such device, or a target that cannot be loaded.
    """
    section, states = run.recipe.target, run.recipe.states
    rows = AnsweredRows(AnswerStore(run.answers_dir))
    if target is None:
        target = Target.of(section, obtain(section, console), device=device_of(section))
    maker = Maker(target, rows, run.recipe.head.aux_layers, states.dtype)
    elsewhere = target.device.type == "cuda" and target.device.index != _local_rank()
    return OnlineStates(maker, states.batch_tokens, fingerprint, AHEAD if elsewhere else 0)


def device_of(section: TargetSection) -> str:
    """The device of this process's target: with several processes on a machine each has one of its own."""
    name, _, first = section.device.partition(":")
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return "cpu"
    return f"cuda:{int(first or 0) + _local_rank()}"


def _local_rank() -> int:
    return int(os.environ.get("LOCAL_RANK", "0"))
