"""Bad rows: they never stop a run, unless there are too many of them."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from data_prep.prompts.rows import Row
from peagle_train.errors import PeagleError
from peagle_train.files import write_text

FILE = "rejects.jsonl"
_QUOTED = 10_000  # rows in the file at most; all are counted
_BEGINNING = 300  # characters of a row that are quoted


class Rejects:
    """Counts rows by source, and quotes the bad ones in a file.

    Args:
        path: of the file; None writes none.
        most: share of a source's rows above which the run ends.
    """

    def __init__(self, path: Path | None = None, most: float = 0.01):
        self.path, self._most = path, most
        self._rows: Counter[str] = Counter()
        self._bad: Counter[str] = Counter()
        self._quotes: list[dict[str, str]] = []

    def count(self, source: str) -> None:
        """One row was read."""
        self._rows[source] += 1

    def add(self, source: str, row: Row, why: str) -> None:
        """That row is bad."""
        self._bad[source] += 1
        if len(self._quotes) < _QUOTED:
            self._quotes.append(
                {"source": source, "where": row.where, "why": why, "row": row.raw[:_BEGINNING]}
            )

    @property
    def total(self) -> int:
        """Bad rows of all sources."""
        return sum(self._bad.values())

    def close(self) -> None:
        """Writes the file, if a row was bad. Raises PeagleError if a source had too many of them."""
        if not self.total:
            return
        if self.path is not None:
            write_text(self.path, "".join(json.dumps(q, ensure_ascii=False) + "\n" for q in self._quotes))
        for source, bad in self._bad.items():
            rows = self._rows[source]
            if bad > self._most * rows:
                first = [quote for quote in self._quotes if quote["source"] == source][:3]
                quotes = "".join(f"\n  {q['where']}: {q['why']}: {q['row'][:100]}" for q in first)
                told = f" All are in {self.path}." if self.path is not None else ""
                raise PeagleError(
                    f"prompt source {source!r}: {bad:,} of {rows:,} rows are bad, more than the "
                    f"{100 * self._most:g} % of data.max_rejects; mend them, or raise it.{told} "
                    f"The first:{quotes}"
                )
