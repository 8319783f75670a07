"""Writing a states store: batch by batch, each whole or not at all, from any number of processes."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import torch

from peagle_train.errors import CorruptError, PeagleError
from peagle_train.files import atomic_file, sha256_of, write_json, write_text
from peagle_train.head.alignment import needed_states
from peagle_train.remote import check_url
from peagle_train.store.format import (
    CURE,
    FORMAT,
    INDEX,
    Batch,
    FileEntry,
    batch_of,
    metadata,
    offsets,
    read_object,
    read_sidecar,
    row_entry,
    sidecar_name,
    states_name,
    tensors_of,
    tokens_name,
    whose,
)
from peagle_train.store.rows import DTYPES, StateRow, cut_row
from peagle_train.store.shards import shards_of
from peagle_train.tensors import save_tensors

DAMAGED = "damaged"
"""What is set aside goes to a folder of this ending: states.damaged/ beside states/."""


class StateWriter:
    """Writes batches in any order, from any process; `seal` ends the store.

    Args:
        directory: of the store.
        fingerprint: of all that the states are made from.
        url: where the states go; None: into the directory. Raises PeagleError for one that is none.
    """

    def __init__(
        self,
        directory: Path,
        fingerprint: str,
        aux_layers: Sequence[int],
        hidden_size: int,
        dtype: str,
        url: str | None = None,
    ):
        self.directory = directory
        self.fingerprint = fingerprint
        self.aux_layers = list(aux_layers)
        self.hidden_size = hidden_size
        self.dtype = dtype
        self.url = None if url is None else check_url(url, "states.url")
        self._shards = shards_of(directory, fingerprint, self.url, cache=0)

    def write_batch(self, batch: int, rows: Sequence[StateRow]) -> None:
        """Writes what somebody reads of some rows; they count once the sidecar stands there.

        Raises PeagleError: a shape that does not fit, NaN or Inf, a disk that is full, a URL that takes
        nothing.
        """
        for row in rows:
            self._check(row)
        rows = [cut_row(row) for row in rows]
        states, tokens, sidecar = (
            self.directory / name(batch) for name in (states_name, tokens_name, sidecar_name)
        )
        sidecar.unlink(missing_ok=True)  # a batch written again must not stand beside older checksums
        made = {name: t for row in rows for name, t in tensors_of(row, self.dtype).items()}
        ids = {name: t for name, t in made.items() if name.endswith(".token_ids")}
        own = metadata(batch, self.fingerprint)
        for path, tensors in ((states, {k: t for k, t in made.items() if k not in ids}), (tokens, ids)):
            with atomic_file(path) as temporary:
                save_tensors(temporary, tensors, own)
        where, places = offsets(states), offsets(tokens)
        entry = Batch(
            batch, _entry(states), _entry(tokens), [row_entry(r, made, where, places) for r in rows]
        )
        self._shards.take(states)
        if self.url is not None:
            self._shards.take(tokens)
            states.unlink()
        about = {"format": FORMAT, "fingerprint": self.fingerprint, "url": self.url}
        write_json(sidecar, {**about, **entry.to_dict()})
        self._shards.take(sidecar)

    def sealed_batches(self) -> set[int]:
        """Batches with a sidecar. Raises StaleError if one was made from other inputs, CorruptError if it
        lacks something."""
        return {batch.batch for batch in self._batches()}

    def seal(self) -> None:
        """Writes index.json over all sealed batches."""
        batches = sorted(self._batches(), key=lambda batch: batch.batch)
        index = {
            "format": FORMAT,
            "fingerprint": self.fingerprint,
            "url": self.url,
            "aux_layers": self.aux_layers,
            "hidden_size": self.hidden_size,
            "dtype": self.dtype,
            "batches": [batch.to_dict() for batch in batches],
        }
        write_text(self.directory / INDEX, json.dumps(index, ensure_ascii=False) + "\n")
        self._shards.take(self.directory / INDEX)

    def damaged(self) -> dict[int, str]:
        """Batches that are not what was written, each with what is wrong; reads the whole store.

        Raises StaleError for a store of other inputs, PeagleError for one that lies elsewhere.
        """
        sizes, faults = self._shards.sizes(), {}
        for path in sorted(self.directory.glob("batch-*.json")):
            batch = batch_of(path.name)
            if batch is None:
                continue
            try:
                fault = self._fault(read_sidecar(path, self.fingerprint, self.url), sizes)
            except CorruptError as error:
                fault = str(error).removesuffix(f"; {CURE}")
            if fault:
                faults[batch] = fault
        return {**self._without_sidecar(faults), **faults}

    def drop(self, batches: Iterable[int]) -> None:
        """Sets some batches aside, and the index with them: `sealed_batches` knows them no more."""
        (self.directory / INDEX).unlink(missing_ok=True)
        aside = self.directory.with_name(f"{self.directory.name}.{DAMAGED}")
        for batch in batches:
            # The sidecar first: a kill in between leaves a batch that does not count.
            for name in (sidecar_name(batch), tokens_name(batch), states_name(batch)):
                file = self.directory / name
                if file.is_file():
                    aside.mkdir(exist_ok=True)
                    file.replace(aside / name)
                if self.url is not None:
                    self._shards.set_aside(name, DAMAGED)

    def _batches(self) -> Iterator[Batch]:
        sizes = self._shards.sizes()
        for path in self.directory.glob("batch-*.json"):
            batch = read_sidecar(path, self.fingerprint, self.url)
            missing = self._cut_short(batch, sizes)
            if missing:
                raise CorruptError(f"{missing}; {CURE}")
            yield batch

    def _cut_short(self, batch: Batch, sizes: dict[str, int]) -> str:
        file = self.directory / batch.tokens.file
        if not file.is_file() or file.stat().st_size != batch.tokens.bytes:
            return f"{file}: missing or cut short"
        if sizes.get(batch.states.file) != batch.states.bytes:
            return f"{self._shards.where}/{batch.states.file}: missing or cut short"
        return ""

    def _fault(self, batch: Batch, sizes: dict[str, int]) -> str:
        """What is wrong with the files of a batch, in words; empty if nothing."""
        if missing := self._cut_short(batch, sizes):
            return missing
        tokens = self.directory / batch.tokens.file
        for path, sha256, found in (
            (tokens, batch.tokens.sha256, sha256_of(tokens)),
            (self.directory / batch.states.file, batch.states.sha256, self._shards.sha256(batch.states.file)),
        ):
            if sha256 != found:
                said = whose(path, batch.batch, self.fingerprint) if path.is_file() else ""
                return f"{path}: differs from its checksum{f': {said}' if said else ''}"
        return ""

    def _without_sidecar(self, known: dict[int, str]) -> dict[int, str]:
        """Batches that the index names and whose sidecar is gone."""
        path = self.directory / INDEX
        if not path.is_file():
            return {}
        try:
            named = [entry["batch"] for entry in read_object(path)["batches"]]
        except (CorruptError, KeyError, TypeError):
            return {}  # the index is made anew from the sidecars
        gone = [batch for batch in named if not (self.directory / sidecar_name(batch)).is_file()]
        return {batch: f"{self.directory / sidecar_name(batch)}: missing" for batch in gone}

    def _check(self, row: StateRow) -> None:
        n, slots, outputs = row.token_ids.numel(), row.token_ids.numel() - 1, row.token_ids.numel() - 1
        if row.last_at is not None:
            slots, outputs = needed_states(row.loss_mask)[0], len(row.last_at)
        expected = {
            "loss_mask": (row.loss_mask, (n,)),
            "aux": (row.aux, (slots, len(self.aux_layers) * self.hidden_size)),
            "last": (row.last, (outputs, self.hidden_size)),
        }
        for name, (tensor, shape) in expected.items():
            if tuple(tensor.shape) != shape:
                raise PeagleError(
                    f"row {row.row} ({row.id}): {name} is {list(tensor.shape)}, expected {list(shape)}"
                )
        if not bool(row.loss_mask.any()):
            raise PeagleError(
                f"row {row.row} ({row.id}) has an all-zero loss mask: nothing could be learned from it"
            )
        kept = cut_row(row)
        for name in ("aux", "last"):
            if not bool(torch.isfinite(getattr(kept, name).to(DTYPES[self.dtype])).all()):
                raise PeagleError(
                    f"row {row.row} ({row.id}): {name} holds NaN or Inf as {self.dtype}; the target "
                    f"overflows: try another target.dtype or states.dtype"
                )


def _entry(path: Path) -> FileEntry:
    return FileEntry(path.name, path.stat().st_size, sha256_of(path))
