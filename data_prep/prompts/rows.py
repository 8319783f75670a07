"""Rows of files as they are read: JSONL, JSON and Parquet, from a file, a folder, a glob or a URL of fsspec.

One row at a time, with its place. A line that cannot be read is a row too, with its fault: whoever reads
decides what a bad row means.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

from peagle_train.errors import PeagleError

KINDS = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")
_BATCH = 1000  # rows of a Parquet file in memory at a time


@dataclass(frozen=True)
class Row:
    """One row: `value`, or what is wrong with it and how it begins."""

    where: str  # "FILE:LINE" or "FILE row N"
    value: dict[str, Any] | None
    fault: str = ""
    raw: str = ""


def files_of(source: str) -> tuple[Any, list[str]]:
    """The file system of a source and its files in it, by name.

    Raises PeagleError: nothing is there, or nothing of a kind that can be read.
    """
    import fsspec

    try:
        system, path = fsspec.core.url_to_fs(source)
    except ImportError as error:
        cure = (
            "pip install 'peagle-train[s3]'"
            if source.startswith("s3")
            else f"install what it asks for: {error}"
        )
        raise PeagleError(
            f"prompt source {source!r}: its kind of URL needs a package more; {cure}"
        ) from error
    except ValueError as error:
        raise PeagleError(f"prompt source {source!r}: no URL that fsspec knows ({error})") from error
    if any(sign in path for sign in "*?["):
        found = system.glob(path)
    elif system.isdir(path):
        found = system.find(path)
    elif system.exists(path):
        return system, [_known_kind(path, source)]
    else:
        found = []
    files = sorted(file for file in found if file.endswith(KINDS))
    if not files:
        raise PeagleError(
            f"prompt source {source!r}: no such file, nor a folder or glob that holds {', '.join(KINDS)}; "
            "expected `stdlib`, `humaneval`, a preset (`peagle sources`), `hub:OWNER/NAME`, or a path (a "
            "relative one starts at the folder the command runs in)"
        )
    return system, files


def read_files(source: str) -> Iterator[Row]:
    """Every row of a source's files, in the order of their names. Raises PeagleError as `files_of`."""
    system, files = files_of(source)
    for file in files:
        with ExitStack() as stack:
            stream = stack.enter_context(system.open(file, "rb"))
            if file.endswith(".gz"):
                stream = stack.enter_context(gzip.open(stream))
            yield from _parquet(stream, file) if file.endswith(".parquet") else _json(stream, file)


def _known_kind(path: str, source: str) -> str:
    if path.endswith(KINDS):
        return path
    raise PeagleError(f"prompt source {source!r}: found another kind of file; expected {', '.join(KINDS)}")


def _json(stream: Any, file: str) -> Iterator[Row]:
    """One object a line, or one list of objects over the whole file."""
    start = stream.read(64).lstrip()[:1]
    stream.seek(0)
    if start == b"[":
        try:
            values = json.loads(stream.read())
        except ValueError as error:
            raise PeagleError(f"{file}: begins as a list but is not JSON ({error})") from error
        for number, value in enumerate(values):
            yield _row(value, f"{file} row {number}", json.dumps(value, ensure_ascii=False))
        return
    for number, line in enumerate(stream, start=1):
        where = f"{file}:{number}"
        try:
            text = line.decode("utf-8")
        except UnicodeDecodeError as error:
            yield Row(where, None, f"not UTF-8 text ({error})", repr(line))
            continue
        if not text.strip():
            continue
        try:
            value = json.loads(text)
        except ValueError as error:
            yield Row(where, None, f"not JSON ({error}); expected one object a line", text.rstrip("\n"))
            continue
        yield _row(value, where, text.rstrip("\n"))


def _row(value: Any, where: str, raw: str) -> Row:
    if not isinstance(value, dict):
        return Row(where, None, f"found {type(value).__name__}, expected an object", raw)
    return Row(where, value, raw=raw)


def _parquet(stream: Any, file: str) -> Iterator[Row]:
    from pyarrow import ArrowInvalid
    from pyarrow.parquet import ParquetFile

    try:
        parquet = ParquetFile(stream)
    except ArrowInvalid as error:
        raise PeagleError(f"{file}: not readable as Parquet ({error})") from error
    number = 0
    for batch in parquet.iter_batches(_BATCH):
        for value in batch.to_pylist():
            yield Row(f"{file} row {number}", value, raw=str(value))
            number += 1
