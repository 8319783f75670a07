"""The written format of a states store, peagle-states-2; docs/store.md draws it.

    states/
      batch-00012.safetensors          of every row its index and     000384.aux   [S, A*H]  dtype
                                                                      000384.last  [P, H]    dtype
      batch-00012.tokens.safetensors   of every row                   000384.token_ids  [n]  int32
      batch-00012.json                 the sidecar: what the two files hold, written last
      index.json                       the content of all sidecars, written when the store is whole

A row's bytes lie side by side in its file, aux before last, at an offset that the sidecar tells beside their
checksum: a row is read with one read and proven as often as it is read, a shard is never read for one row.
The loss mask is the sidecar's `spans`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import xxhash
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle_train.errors import CorruptError, PeagleError, StaleError
from peagle_train.files import read_json
from peagle_train.store.rows import DTYPES, StateRow

FORMAT = "peagle-states-2"
INDEX = "index.json"
Offsets = dict[str, tuple[int, int]]

CURE = "run `peagle extract RECIPE --repair`, which makes the damaged batches anew"


@dataclass(frozen=True)
class Piece:
    """Where some of a row's bytes lie in a file, and their checksum (xxh3, 64 bits, hexadecimal)."""

    begin: int
    bytes: int
    xxh3: str


@dataclass(frozen=True)
class RowEntry:
    """A row in a sidecar. spans: [start, end) of every generated turn."""

    row: int
    set: str
    id: str
    tokens: int
    prompt_length: int
    spans: list[list[int]]
    token_ids: Piece
    states: Piece

    @classmethod
    def parse(cls, entry: dict[str, Any]) -> RowEntry:
        return cls(**{**entry, "token_ids": Piece(**entry["token_ids"]), "states": Piece(**entry["states"])})

    @property
    def supervised(self) -> int:
        return sum(end - start for start, end in self.spans)

    @property
    def loss_mask(self) -> Tensor:
        """[n] bool."""
        mask = torch.zeros(self.tokens, dtype=torch.bool)
        for start, end in self.spans:
            mask[start:end] = True
        return mask


@dataclass(frozen=True)
class FileEntry:
    """A file of a batch."""

    file: str
    bytes: int
    sha256: str


@dataclass(frozen=True)
class Batch:
    """The content of a sidecar."""

    batch: int
    states: FileEntry
    tokens: FileEntry
    rows: list[RowEntry]

    @classmethod
    def parse(cls, entry: dict[str, Any]) -> Batch:
        """Raises KeyError or TypeError if the entry is none."""
        return cls(
            entry["batch"],
            FileEntry(**entry["states"]),
            FileEntry(**entry["tokens"]),
            [RowEntry.parse(row) for row in entry["rows"]],
        )

    def to_dict(self) -> dict[str, Any]:
        """What `parse` reads."""
        rows = [{**vars(r), "token_ids": vars(r.token_ids), "states": vars(r.states)} for r in self.rows]
        return {"batch": self.batch, "states": vars(self.states), "tokens": vars(self.tokens), "rows": rows}


def states_name(batch: int) -> str:
    return f"batch-{batch:05d}.safetensors"


def tokens_name(batch: int) -> str:
    return f"batch-{batch:05d}.tokens.safetensors"


def sidecar_name(batch: int) -> str:
    return f"batch-{batch:05d}.json"


def batch_of(name: str) -> int | None:
    """The batch that a file of a store belongs to, by its name."""
    number = name.removeprefix("batch-").partition(".")[0]
    return int(number) if name.startswith("batch-") and number.isdigit() else None


def metadata(batch: int, fingerprint: str) -> dict[str, str]:
    """What a file of a batch says of itself: two that were exchanged are known by it.

    One key, for safetensors writes several in any order: the same batch is the same file, to the last byte.
    """
    return {"holds": f"batch {batch} of {fingerprint}, {FORMAT}"}


def checksum(*parts: Tensor) -> str:
    """xxh3 of the bytes of some CPU tensors, one after the other."""
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def checksum_of_bytes(data: bytes | bytearray) -> str:
    """As `checksum`, of bytes that were read."""
    return xxhash.xxh3_64_hexdigest(data)


def spans_of(loss_mask: Tensor) -> list[list[int]]:
    """[start, end) of every run of true values."""
    edges = torch.diff(loss_mask.int(), prepend=torch.zeros(1), append=torch.zeros(1))
    starts, ends = (edges == 1).nonzero()[:, 0].tolist(), (edges == -1).nonzero()[:, 0].tolist()
    return [list(pair) for pair in zip(starts, ends, strict=True)]


def tensors_of(row: StateRow, dtype: str) -> dict[str, Tensor]:
    """The tensors of a row that is cut, by their names in the files."""
    name = f"{row.row:06d}"
    return {
        f"{name}.token_ids": row.token_ids.to("cpu", torch.int32).contiguous(),
        f"{name}.aux": row.aux.to("cpu", DTYPES[dtype]).contiguous(),
        f"{name}.last": row.last.to("cpu", DTYPES[dtype]).contiguous(),
    }


def row_entry(row: StateRow, tensors: dict[str, Tensor], states: Offsets, tokens: Offsets) -> RowEntry:
    """The entry of a row that is cut, whose tensors lie at these offsets of the two files."""
    name = f"{row.row:06d}"
    ids, aux, last = (tensors[f"{name}.{part}"] for part in ("token_ids", "aux", "last"))
    (begin, middle), (start, end) = states[f"{name}.aux"], states[f"{name}.last"]
    assert middle == start, f"row {row.row}: its last does not follow its aux"
    return RowEntry(
        row.row,
        row.set,
        row.id,
        row.token_ids.numel(),
        row.prompt_length,
        spans_of(row.loss_mask),
        Piece(tokens[f"{name}.token_ids"][0], ids.nbytes, checksum(ids)),
        Piece(begin, end - begin, checksum(aux, last)),
    )


def offsets(path: Path) -> Offsets:
    """[begin, end) of every tensor of a safetensors file, in bytes of the file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    names = [name for name in header if name != "__metadata__"]
    return {name: tuple(8 + size + edge for edge in header[name]["data_offsets"]) for name in names}


def read_sidecar(path: Path, fingerprint: str, url: str | None) -> Batch:
    """A sidecar that belongs where it stands.

    Raises CorruptError, StaleError for one of other inputs, PeagleError if its states lie elsewhere.
    """
    entry = read_object(path)
    name = entry.get("states", {}).get("file") if isinstance(entry.get("states"), dict) else entry.get("file")
    if entry.get("format") != FORMAT or entry.get("fingerprint") != fingerprint:
        raise StaleError(
            f"{path.parent / str(name)}: made from other inputs (fingerprint {entry.get('fingerprint')}, "
            f"expected {fingerprint}; format {entry.get('format')!r}, expected {FORMAT!r}); move the folder "
            f"{path.parent} away and extract again"
        )
    if entry.get("url") != url:
        raise PeagleError(
            f"{path}: its states lie {_at(entry.get('url'))}, the recipe has them {_at(url)}; write "
            "states.url as it was, or give the run another `name`"
        )
    try:
        batch = Batch.parse(entry)
    except (KeyError, TypeError, AttributeError) as error:
        raise CorruptError(f"{path}: not a sidecar ({error!r}); {CURE}") from error
    if sidecar_name(batch.batch) != path.name or batch_of(batch.states.file) != batch.batch:
        raise CorruptError(f"{path}: the sidecar of batch {batch.batch}, in the place of another; {CURE}")
    return batch


def _at(url: str | None) -> str:
    return "in its folder (no states.url)" if url is None else f"at {url}"


def read_object(path: Path) -> dict[str, Any]:
    """A JSON object. Raises CorruptError."""
    try:
        return dict(read_json(path))
    except (CorruptError, ValueError, TypeError) as error:
        raise CorruptError(f"{path}: not readable as JSON ({error}); {CURE}") from error


def whose(path: Path, batch: int, fingerprint: str) -> str:
    """What a file on the disk says of itself that does not fit, in words; empty if all does."""
    try:
        with safe_open(path, framework="pt") as file:
            found = file.metadata()
    except (SafetensorError, OSError) as error:
        return f"it is damaged ({error})"
    if found == metadata(batch, fingerprint):
        return ""
    return f"it holds {(found or {}).get('holds')}: files were exchanged"
