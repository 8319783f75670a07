"""Files that appear whole or not at all.

A process may be killed between any two instructions, so nothing is ever written under its final
name: content goes to a temporary neighbour, is flushed to the disk, and is renamed. Readers
therefore see the old content or the new, never a half.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from peagle_train.errors import CorruptError, PeagleError

_TEMPORARY = ".partial"
_SLACK = 1 << 20  # for what stands beside the tensors, and for whole blocks


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """Yields a temporary path beside `path`; renames it to `path` when the block ends without error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
    try:
        yield temporary
        _flush(temporary)
        temporary.replace(path)
        _flush(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_directory(path: Path) -> Iterator[Path]:
    """Yields an empty temporary directory; it replaces `path` when the block ends without error."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}{_TEMPORARY}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    old = path.with_name(f".{path.name}.{os.getpid()}.old{_TEMPORARY}")
    try:
        yield temporary
        for file in sorted(temporary.rglob("*")):
            _flush(file)
        if path.exists():
            path.rename(old)
        temporary.rename(path)
        _flush(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        shutil.rmtree(old, ignore_errors=True)


def write_text(path: Path, text: str) -> None:
    """Writes `text` to `path` atomically."""
    with atomic_file(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Writes `value` to `path` as indented JSON, atomically."""
    write_text(path, json.dumps(value, indent=2, ensure_ascii=False) + "\n")


def read_json(path: Path) -> Any:
    """Reads a JSON file. Raises CorruptError if its content is no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise CorruptError(
            f"{path}: not readable as JSON ({error}): cut short or damaged; move it away and run the "
            "command again"
        ) from error


def remove_leftovers(directory: Path) -> None:
    """Clears a folder of what killed writers left, putting back what they were about to replace.

    Only for a folder in which no other process works.
    """
    for path in directory.glob(f".*{_TEMPORARY}"):
        name, _, kind = path.name.removesuffix(_TEMPORARY).removeprefix(".").rpartition(".")
        if kind == "old" and not (standing := directory / name.rpartition(".")[0]).exists():
            path.rename(standing)  # killed between the two renames of atomic_directory
        elif path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()


def require_room(directory: Path, needed: int, what: str) -> None:
    """Raises PeagleError if the disk of a folder has not `needed` bytes free for `what`; touches nothing."""
    standing = directory
    while not standing.exists():
        standing = standing.parent
    free = shutil.disk_usage(standing).free
    if free < needed + _SLACK:
        raise PeagleError(
            f"{directory}: {what} needs {needed / 1e6:,.1f} MB, and its disk has {free / 1e6:,.1f} MB free; "
            "nothing was written, and nothing that stood there was changed. Make room, or move the run's "
            "folder to another disk and set `output` to that, and run the command again."
        )


def sha256_of(path: Path) -> str:
    """The SHA-256 of a file's content, in hexadecimal."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def fingerprint(value: Any) -> str:
    """Sixteen hexadecimal digits that name a JSON value: equal values, equal names, on every machine."""
    canonical = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
