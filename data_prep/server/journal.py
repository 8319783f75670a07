"""The journal of answers: one line a conversation, written when it is over.

A line holds the conversation's key, which depends on what was asked alone, its rows, and a checksum. So a
process that was killed loses at most the requests in flight, and prompts may come in another order the next
time: what is in the journal is not asked again. A line that is torn or damaged counts as not there.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from peagle_train.files import fingerprint
from peagle_train.store.answers import AnswerRow

FILE = "journal.jsonl"


class Journal:
    """The journal of one answers folder, open for writing; close it.

    Attributes:
        damaged: lines that were there and could not be read.
    """

    def __init__(self, directory: Path):
        self.path = directory / FILE
        self.damaged = 0
        self._places: dict[str, int] = {}  # of the lines, by key
        self._file = self.path.open("a+b")
        self._file.seek(0)
        whole = 0
        while line := self._file.readline():
            entry = _parse(line)
            if entry is None:
                self.damaged += 1
            else:
                self._places[entry["key"]] = whole
            whole += len(line)
        if whole and not self._ends_a_line(whole):
            self._file.write(b"\n")  # a torn line stays behind as a damaged one

    def __contains__(self, key: str) -> bool:
        return key in self._places

    def __len__(self) -> int:
        return len(self._places)

    def write(self, key: str, rows: Sequence[AnswerRow]) -> None:
        """Adds a conversation; after a kill of this process the line is there whole or not at all."""
        values = [asdict(row) for row in rows]
        line = json.dumps({"key": key, "checksum": fingerprint(values), "rows": values}, ensure_ascii=False)
        self._file.seek(0, os.SEEK_END)
        place = self._file.tell()
        self._file.write(line.encode() + b"\n")
        self._file.flush()
        self._places[key] = place

    def rows(self, key: str, first: int, set: str, id: str) -> list[AnswerRow]:
        """The rows of a conversation, numbered from `first`, under the names it has now."""
        self._file.seek(self._places[key])
        entry = _parse(self._file.readline())
        assert entry is not None  # it was read, or written, by this process
        rows = [AnswerRow(**row) for row in entry["rows"]]
        start = rows[0].row if rows else 0
        return [replace(row, row=first + row.row - start, set=set, id=id) for row in rows]

    def close(self, *, remove: bool = False) -> None:
        """remove: all of it is kept elsewhere now."""
        self._file.close()
        if remove:
            self.path.unlink()

    def _ends_a_line(self, size: int) -> bool:
        self._file.seek(size - 1)
        return self._file.read(1) == b"\n"


def _parse(line: bytes) -> dict[str, Any] | None:
    """The entry of a line; None if it is torn or differs from its checksum."""
    try:
        entry: dict[str, Any] = json.loads(line)
        return entry if fingerprint(entry["rows"]) == entry["checksum"] else None
    except (ValueError, KeyError, TypeError):
        return None
