"""Where a training's rows come from: a store on the disk, or something that makes them as they are asked for.

`StateStore` is one such source. Others run the target themselves: data preparation has them, the command line
hands them over, and training and evaluation know these protocols alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

from rich.console import Console
from torch import Tensor

from peagle_train.store.states import GB, RowInfo, StateRow, StateStore

if TYPE_CHECKING:
    from peagle_train.run import Run
    from peagle_train.target.adapter import Target


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
        """One row with its states. Raises NotFiniteError if they hold NaN or Inf."""

    def upcoming(self, rows: Sequence[int]) -> None:
        """Told ahead which rows will be read next; a source may make them meanwhile, together.

        What is told in one call belongs to one step, so a source that makes them together makes the same
        after a stop.
        """

    def close(self) -> None:
        """Gives back what the source holds: a thread, a process, files."""


class OpenStates(Protocol):
    """Opens the source of a run in this process.

    fingerprint: what the stage `extract` recorded. target: the target where the caller has it loaded.
    """

    def __call__(
        self, run: Run, fingerprint: str, console: Console, target: Target | None = None
    ) -> StatesSource: ...


def open_stored(run: Run, fingerprint: str, console: Console, target: Target | None = None) -> StateStore:
    """The store that `extract` finished. Raises as StateStore."""
    return StateStore(run.states_dir, expected=fingerprint, cache=run.recipe.states.cache * GB)
