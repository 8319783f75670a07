"""Where a training's rows come from: a store on the disk, or something that makes them as they are asked for.

`StateStore` is one such source. Others run the target themselves: data preparation has them, the command line
hands them over, and training knows this protocol alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from torch import Tensor

from peagle_train.store.states import RowInfo, StateRow


class StatesSource(Protocol):
    """Rows with the target's hidden states, by index, in any order, as often as asked."""

    aux_layers: list[int]
    hidden_size: int
    dtype: str
    fingerprint: str

    def __len__(self) -> int: ...

    def info(self, set: str | None = None) -> list[RowInfo]:
        """Rows of one set, or of all, by rising index."""

    def info_of(self, row: int) -> RowInfo:
        """What is known of one row."""

    def token_ids(self, row: int) -> Tensor:
        """[n] int64, without the states."""

    def loss_mask(self, row: int) -> Tensor:
        """[n] bool, without the states."""

    def read(self, row: int) -> StateRow:
        """One row with its states."""

    def upcoming(self, rows: Sequence[int]) -> None:
        """Told ahead which rows will be read next, in this order; a source may make them meanwhile."""
