"""The states of rows, made by a loaded target when they are asked for.

What is announced together is computed together, in micro-batches of like length: the company of a row is
then a function of the step it belongs to, and a training that goes on after a stop computes what it
would have computed, to the last bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from data_prep import teacher_forcing
from data_prep.teacher_forcing import forced_states
from peagle_train.errors import PeagleError
from peagle_train.store.answers import AnswerStore
from peagle_train.store.states import DTYPES, RowInfo, StateRow
from peagle_train.target.adapter import Target


@dataclass(frozen=True)
class _Row:
    info: RowInfo
    token_ids: Tensor  # [n] int32: half of int64, a ninth of a list
    spans: list[list[int]]


class AnsweredRows:
    """The rows of an answers store by index, in memory, without states: 4 bytes a token."""

    def __init__(self, answers: AnswerStore):
        self.directory = answers.directory
        self._rows: dict[int, _Row] = {}
        for row in (row for batch in answers.stream() for row in batch):
            size, where = len(row.token_ids), str(self.directory)
            info = RowInfo(row.row, row.set, row.id, size, row.supervised, row.prompt_length, where)
            self._rows[row.row] = _Row(info, torch.tensor(row.token_ids, dtype=torch.int32), row.spans)

    def __len__(self) -> int:
        return len(self._rows)

    def info(self, set: str | None = None) -> list[RowInfo]:
        """Rows of one set, or of all, by rising index. Raises PeagleError for an unknown set."""
        infos = [self._rows[row].info for row in sorted(self._rows)]
        found = [info for info in infos if set is None or info.set == set]
        if set is not None and not found:
            names = sorted({info.set for info in infos})
            raise PeagleError(f"{self.directory}: no set {set!r}; it holds {', '.join(names)}")
        return found

    def info_of(self, row: int) -> RowInfo:
        """What is known of one row; as its shard the folder of its answer."""
        return self._row(row).info

    def token_ids(self, row: int) -> Tensor:
        """[n] int64."""
        return self._row(row).token_ids.long()

    def loss_mask(self, row: int) -> Tensor:
        """[n] bool."""
        found = self._row(row)
        mask = torch.zeros(len(found.token_ids), dtype=torch.bool)
        for start, end in found.spans:
            mask[start:end] = True
        return mask

    def _row(self, row: int) -> _Row:
        found = self._rows.get(row)
        if found is None:
            raise PeagleError(f"{self.directory}: no row {row}; it holds {len(self)} rows")
        return found


class MadeStates:
    """What sources that make states when they are asked for have in common: all that needs no states.

    aux_layers, hidden_size, dtype, fingerprint: as of a `StatesSource`.
    """

    def __init__(
        self, rows: AnsweredRows, aux_layers: Sequence[int], hidden_size: int, dtype: str, fingerprint: str
    ):
        self.aux_layers, self.hidden_size = list(aux_layers), hidden_size
        self.dtype, self.fingerprint = dtype, fingerprint
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def info(self, set: str | None = None) -> list[RowInfo]:
        """Rows of one set, or of all, by rising index. Raises PeagleError for an unknown set."""
        return self._rows.info(set)

    def info_of(self, row: int) -> RowInfo:
        """What is known of one row."""
        return self._rows.info_of(row)

    def token_ids(self, row: int) -> Tensor:
        """[n] int64, without the states."""
        return self._rows.token_ids(row)

    def loss_mask(self, row: int) -> Tensor:
        """[n] bool, without the states."""
        return self._rows.loss_mask(row)


def cut(rows: AnsweredRows, wanted: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Micro-batches of some rows, as `teacher_forcing.cut`: the same for the same rows in any order."""
    ordered = sorted(set(wanted))
    batches = teacher_forcing.cut([rows.info_of(row).tokens for row in ordered], batch_tokens)
    return [[ordered[index] for index in batch] for batch in batches]


class Maker:
    """Makes rows of states with a target.

    Args:
        target: loaded, on the device on which it is to run.
        rows: the answers.
        aux_layers: tapped layers, vLLM's ids.
        dtype: of the states that are handed out.
    """

    def __init__(self, target: Target, rows: AnsweredRows, aux_layers: Sequence[int], dtype: str):
        self.rows, self.aux_layers, self.dtype = rows, list(aux_layers), dtype
        self.hidden_size = target.facts.hidden_size
        self._target = target

    def made(self, batch: Sequence[int]) -> list[StateRow]:
        """The states of one micro-batch, in its order."""
        tokens = [self.rows.token_ids(row) for row in batch]
        lists = [ids.tolist() for ids in tokens]
        states = forced_states(self._target, lists, self.aux_layers, DTYPES[self.dtype])
        found = []
        for row, ids, (aux, last) in zip(batch, tokens, states, strict=True):
            info, mask = self.rows.info_of(row), self.rows.loss_mask(row)
            found.append(StateRow(row, info.set, info.id, ids, mask, aux, last, info.prompt_length))
        return found
