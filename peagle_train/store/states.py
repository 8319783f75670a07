"""The states store: hidden states of the target beside the tokens they belong to, row by row.

    writer.py    StateWriter: batches, each whole or not at all
    states.py    StateStore: rows in any order, each proven whenever it is read
    format.py    the files and what stands in them; docs/store.md
    rows.py      a row, and what is kept of it
    shards.py    where the files lie: in the folder, or at a URL behind cache.py
    ahead.py     rows that will be asked for are read meanwhile

A row costs its own bytes, never its shard's, in time and in memory, and nothing stays open between two rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from peagle_train.errors import CorruptError, PeagleError, StaleError
from peagle_train.head.alignment import needed_states
from peagle_train.store.ahead import Ahead
from peagle_train.store.format import (
    CURE,
    FORMAT,
    INDEX,
    Batch,
    Piece,
    RowEntry,
    checksum_of_bytes,
    read_object,
    whose,
)
from peagle_train.store.rows import (
    DTYPES,
    NotFiniteError,
    RowInfo,
    StateRow,
    bytes_per_token,
    require_finite,
    stored_bytes,
    stored_bytes_at_most,
)
from peagle_train.store.shards import RemoteShards, read_piece, shards_of
from peagle_train.store.writer import StateWriter

__all__ = [
    "DTYPES",
    "FORMAT",
    "GB",
    "INDEX",
    "NotFiniteError",
    "RowInfo",
    "StateRow",
    "StateStore",
    "StateWriter",
    "bytes_per_token",
    "require_finite",
    "stored_bytes",
    "stored_bytes_at_most",
]

GB = 1e9
DEFAULT_CACHE = 50 * GB
"""As states.cache of a recipe."""

AHEAD_BYTES = 1 << 30
"""States in memory at most that are read before they are asked for."""

READERS, REMOTE_READERS = 1, 8
"""Threads that read ahead, of a store in its folder and of one at a URL, where a row waits for its answer."""


class StateStore:
    """Reads a sealed states store row by row, in any order: a `StatesSource`."""

    def __init__(self, directory: Path, expected: str | None = None, *, cache: float = DEFAULT_CACHE):
        """cache: bytes that may lie in the folder of rows fetched from a URL.

        Raises PeagleError (not made yet), StaleError (`expected` differs) or CorruptError.
        """
        self.directory = directory
        path = directory / INDEX
        if not path.is_file():
            raise PeagleError(
                f"{directory}: no finished hidden states here; run `peagle extract RECIPE` first"
            )
        index = read_object(path)
        if index.get("format") != FORMAT:
            raise StaleError(
                f"{path}: format {index.get('format')!r}, this version reads {FORMAT!r}; move the folder "
                f"{directory} away and run `peagle extract RECIPE` again"
            )
        self.fingerprint: str = index["fingerprint"]
        if expected is not None and expected != self.fingerprint:
            raise StaleError(
                f"{directory}: states made from other inputs (fingerprint {self.fingerprint}, expected "
                f"{expected}); run `peagle extract RECIPE` again"
            )
        self.aux_layers: list[int] = index["aux_layers"]
        self.hidden_size: int = index["hidden_size"]
        self.dtype: str = index["dtype"]
        self._shards = shards_of(directory, self.fingerprint, index["url"], int(cache))
        try:
            batches = [Batch.parse(entry) for entry in index["batches"]]
        except (KeyError, TypeError, AttributeError) as error:
            raise CorruptError(f"{path}: not an index ({error!r}); {CURE}") from error
        self._require_files(batches)
        self._rows = {row.row: (batch, row) for batch in batches for row in batch.rows}
        self._ahead = self._reader()

    def __getstate__(self) -> dict[str, Any]:
        """Threads stay behind when the store travels to another process."""
        return {name: value for name, value in self.__dict__.items() if name != "_ahead"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._ahead = self._reader()

    def __len__(self) -> int:
        return len(self._rows)

    def info(self, set: str | None = None) -> list[RowInfo]:
        """Rows of one set, or of all, by rising index."""
        infos = [self.info_of(row) for row in sorted(self._rows)]
        rows = [info for info in infos if set is None or info.set == set]
        if set is not None and not rows:
            names = sorted({info.set for info in infos})
            raise PeagleError(f"{self.directory}: no set {set!r}; it holds {', '.join(names)}")
        return rows

    def info_of(self, row: int) -> RowInfo:
        """What is known of one row."""
        batch, entry = self._entry(row)
        return RowInfo(
            row,
            entry.set,
            entry.id,
            entry.tokens,
            entry.supervised,
            entry.prompt_length,
            batch.states.file,
        )

    def token_ids(self, row: int) -> Tensor:
        """[n] int64, the tokens of a row without its states."""
        batch, entry = self._entry(row)
        path = self.directory / batch.tokens.file
        data = self._proven(
            lambda: read_piece(path, entry.token_ids), f"{path}", "token ids", batch, entry, entry.token_ids
        )
        return _tensor(data, torch.int32).long()

    def loss_mask(self, row: int) -> Tensor:
        """[n] bool, the loss mask of a row; reads nothing."""
        return self._entry(row)[1].loss_mask

    def read(self, row: int) -> StateRow:
        """Reads one row, cut to what is needed.

        Raises PeagleError for an unknown index, CorruptError for a row that is not what was written,
        NotFiniteError for states that hold NaN or Inf.
        """
        return self._ahead.take(row)

    def upcoming(self, rows: Sequence[int]) -> None:
        """Told ahead which rows will be read next: threads read them meanwhile, in bounded memory."""
        self._ahead.announce(rows)

    def close(self) -> None:
        """Ends the threads that read ahead."""
        self._ahead.close()

    def not_finite(self, rows: Sequence[int]) -> dict[int, str]:
        """Those of some rows whose states hold NaN or Inf, each with what is wrong; reads them all."""
        faults = {}
        self.upcoming(rows)
        for row in rows:
            try:
                self.read(row)
            except NotFiniteError as error:
                faults[row] = error.fault
        return faults

    def verify(self) -> None:
        """Reads everything and compares every checksum; raises CorruptError naming the first fault."""
        faults = self._writer().damaged()
        if faults:
            raise CorruptError(f"{faults[min(faults)]}; {CURE}")

    def _writer(self) -> StateWriter:
        url = self._shards.url if isinstance(self._shards, RemoteShards) else None
        return StateWriter(
            self.directory, self.fingerprint, self.aux_layers, self.hidden_size, self.dtype, url
        )

    def _reader(self) -> Ahead:
        threads = REMOTE_READERS if isinstance(self._shards, RemoteShards) else READERS
        return Ahead(self._read, lambda row: self._entry(row)[1].states.bytes, threads, AHEAD_BYTES)

    def _entry(self, row: int) -> tuple[Batch, RowEntry]:
        found = self._rows.get(row)
        if found is None:
            raise PeagleError(f"{self.directory}: no row {row}; it holds {len(self)} rows")
        return found

    def _require_files(self, batches: list[Batch]) -> None:
        """Every file is there with its size: one look at the folder and one at the URL."""
        there = {path.name: path.stat().st_size for path in self.directory.glob("batch-*.tokens.safetensors")}
        sizes = self._shards.sizes()
        for batch in batches:
            for where, found, file in (
                (self.directory, there, batch.tokens),
                (self._shards.where, sizes, batch.states),
            ):
                if found.get(file.file) != file.bytes:
                    raise CorruptError(f"{where}/{file.file}: missing or cut short; {CURE}")
        if isinstance(self._shards, RemoteShards):
            self._shards.require_room(sum(batch.states.bytes for batch in batches))

    def _read(self, row: int) -> StateRow:
        batch, entry = self._entry(row)
        where = f"{self._shards.where}/{batch.states.file}"
        data = self._proven(
            lambda: self._shards.read(row, batch.states.file, entry.states),
            where,
            "states",
            batch,
            entry,
            entry.states,
        )
        mask, dtype = entry.loss_mask, DTYPES[self.dtype]
        slots, outputs = needed_states(mask)
        width = len(self.aux_layers) * self.hidden_size
        states = _tensor(data, dtype)
        if states.numel() != slots * width + len(outputs) * self.hidden_size:
            raise CorruptError(
                f"{where}: row {row} ({entry.set} {entry.id}): {states.numel():,} numbers, expected "
                f"{slots} x {width} + {len(outputs)} x {self.hidden_size}; {CURE}"
            )
        found = StateRow(
            row,
            entry.set,
            entry.id,
            self.token_ids(row),
            mask,
            states[: slots * width].view(slots, width),
            states[slots * width :].view(len(outputs), self.hidden_size),
            entry.prompt_length,
            outputs,
        )
        return require_finite(found, f"{where}: row {row}")

    def _proven(
        self,
        fetch: Callable[[], bytearray],
        where: str,
        what: str,
        batch: Batch,
        entry: RowEntry,
        piece: Piece,
    ) -> bytearray:
        """The bytes of a piece, which have its checksum. where: their file, for people."""
        named = f"{where}: row {entry.row} ({entry.set} {entry.id})"
        try:
            data = fetch()
        except (CorruptError, FileNotFoundError) as error:
            raise CorruptError(f"{named}: {error}; {CURE}") from error
        if checksum_of_bytes(data) != piece.xxh3:
            path = Path(where)
            said = whose(path, batch.batch, self.fingerprint) if path.is_file() else ""
            raise CorruptError(
                f"{named}: its {what} differ from their checksum{f': {said}' if said else ''}; {CURE}"
            )
        return data


def _tensor(data: bytearray, dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(data, dtype=dtype) if data else torch.empty(0, dtype=dtype)
