"""What a delivered head consists of, and how a reader tells that it is whole.

`manifest.json` names every file of a head with its size and SHA-256. It is the last thing that
becomes visible at a destination, so a reader who finds it may trust that the rest is there:

    files ──► each read back and compared ──► manifest.json ──► read back

Before anything is sent, what already stands at the destination is compared with the manifest of
the head (`compare`). Nothing of other content is replaced unless that was asked for.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle_train.errors import CorruptError, StaleError

MANIFEST_NAME = "manifest.json"
CARD_NAME = "README.md"
FORMAT = "peagle-head-manifest/1"

# A server that finds one of these loads it together with the head's own weights.
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
# The stage's own record of the run that made the head; it means nothing elsewhere.
_NOT_DELIVERED = {MANIFEST_NAME, "stage.json"}
_BLOCK = 1 << 20


@dataclass(frozen=True)
class FileEntry:
    """One file: its size in bytes and the SHA-256 of its content in hexadecimal."""

    size: int
    sha256: str


@dataclass(frozen=True)
class Manifest:
    """The files of a head by name (relative, with forward slashes), the manifest itself left out."""

    files: Mapping[str, FileEntry]

    @classmethod
    def of(cls, paths: Mapping[str, Path], advance: Callable[[int], Any] = lambda _: None) -> Manifest:
        """Reads every file once. `advance` is told the number of bytes read, for a progress bar."""
        files = {}
        for name, path in sorted(paths.items()):
            with path.open("rb") as file:
                files[name] = entry_of(iter(lambda: file.read(_BLOCK), b""), advance)
        return cls(files)

    @classmethod
    def parse(cls, text: str | bytes, where: str) -> Manifest:
        """Reads the content of a manifest file found at `where`. Raises CorruptError if it is not one."""
        try:
            value = json.loads(text)
        except ValueError as error:
            raise CorruptError(f"{where}: not JSON ({error}); expected a head's manifest") from error
        if not isinstance(value, dict) or value.get("format") != FORMAT:
            found = value.get("format") if isinstance(value, dict) else type(value).__name__
            raise CorruptError(f"{where}: format {found!r}; expected {FORMAT!r}")
        files = value.get("files")
        if not isinstance(files, dict) or not all(
            isinstance(entry, dict)
            and isinstance(entry.get("size"), int)
            and isinstance(entry.get("sha256"), str)
            for entry in files.values()
        ):
            raise CorruptError(f"{where}: `files` must give size and sha256 of every file")
        return cls({name: FileEntry(entry["size"], entry["sha256"]) for name, entry in files.items()})

    def to_json(self) -> str:
        """The content of the manifest file. Equal heads give equal text: it holds no date and no place."""
        files = {
            name: {"size": entry.size, "sha256": entry.sha256} for name, entry in sorted(self.files.items())
        }
        return json.dumps({"format": FORMAT, "files": files}, indent=2, ensure_ascii=False) + "\n"

    @property
    def size(self) -> int:
        """Bytes of all files together."""
        return sum(entry.size for entry in self.files.values())


def entry_of(blocks: Iterable[bytes], advance: Callable[[int], Any] = lambda _: None) -> FileEntry:
    """Size and SHA-256 of a stream of blocks, without keeping it."""
    digest, size = hashlib.sha256(), 0
    for block in blocks:
        digest.update(block)
        size += len(block)
        advance(len(block))
    return FileEntry(size, digest.hexdigest())


def head_files(head: Path) -> dict[str, Path]:
    """The files of a head folder that are delivered. Hidden files and records of the run stay at home."""
    return {
        relative.as_posix(): head / relative
        for relative in sorted(path.relative_to(head) for path in head.rglob("*") if path.is_file())
        if not any(part.startswith(".") for part in relative.parts)
        and relative.as_posix() not in _NOT_DELIVERED
    }


def read_back_matches(expected: FileEntry, found: FileEntry, name: str, where: str) -> None:
    """Raises CorruptError if what was read back from `where` is not what was sent."""
    if found != expected:
        raise CorruptError(
            f"{where}: {name} came back different: sent {expected.size} bytes with SHA-256 "
            f"{expected.sha256}, read {found.size} bytes with {found.sha256}. "
            "The upload was damaged, or someone else wrote there. Push again with --force"
        )


@dataclass(frozen=True)
class Comparison:
    """A head against its destination: what to send, what to remove, or that nothing is to do."""

    complete: bool  # every file and the manifest are there already
    send: tuple[str, ...]  # names to upload (without the manifest)
    remove: tuple[str, ...]  # files of the head that stood there before; the new one lacks them
    kept: tuple[str, ...]  # files of someone else, left alone


def compare(
    new: Manifest, equal: set[str], present: set[str], old: Manifest | None, where: str, *, force: bool
) -> Comparison:
    """Decides what a push does, given what stands at the destination.

    Args:
        new: the head to deliver.
        equal: names whose content at the destination is already that of `new`.
        present: all names at the destination; `manifest.json` only if it is not a head's manifest.
        old: the manifest found there; None if there is none, or none that can be read.
        where: the destination, for messages.
        force: replace other content.

    Raises StaleError if other content stands there and `force` is false, or if files there would be
    loaded as part of the new head although they belong to neither.
    """
    mine = set(new.files)
    differing, others = (present & mine) - equal, present - mine
    send = tuple(sorted(mine - equal))
    if not send and old is not None and old.files == new.files:
        return Comparison(True, (), (), tuple(sorted(others)))
    if (differing or others) and not force:
        raise StaleError(
            f"{where}: other content stands there: {_some(differing | others)}. "
            "Push to another place, or replace it with --force"
        )
    outdated = others & set(old.files if old else ())
    kept = others - outdated - {MANIFEST_NAME}
    if loaded := {name for name in kept if "/" not in name and name.endswith(_WEIGHT_SUFFIXES)}:
        raise StaleError(
            f"{where}: {_some(loaded)} belong to no head that was pushed there, yet a server would load them "
            "beside this one. Remove them by hand, or push to another place"
        )
    return Comparison(False, send, tuple(sorted(outdated)), tuple(sorted(kept)))


def _some(names: Iterable[str], most: int = 5) -> str:
    ordered = sorted(names)
    more = f" and {len(ordered) - most} more" if len(ordered) > most else ""
    return ", ".join(ordered[:most]) + more
