"""What reading a foreign head brings to light: what was put into other words, and what is wrong."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peagle_train.export.faults import brief, fault

FETCH_AGAIN = "fetch the head again, or ask its maker"


@dataclass(frozen=True)
class Change:
    """One thing that reads otherwise in our layout: a key, a tensor or a file, before and after."""

    what: str
    found: str
    now: str


@dataclass
class Findings:
    """Changes and faults in the order they were met.

    Attributes:
        neutral: options left out whose default changes nothing.
        file: what is being read; each fault names it.
    """

    changes: list[Change] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    neutral: list[str] = field(default_factory=list)
    file: str = ""

    def change(self, what: str, found: str, now: str) -> None:
        self.changes.append(Change(what, found, now))

    def default(self, key: str, value: Any) -> None:
        """A key that was left out, and the value vLLM gives it."""
        if value is False or value == "silu" or (isinstance(value, float) and value == 1.0):
            self.neutral.append(key)
        else:
            self.change(key, "left out", f"{brief(value)}, vLLM's default")

    def fault(self, where: str, found: str, expected: str, cure: str = FETCH_AGAIN) -> None:
        place = f"{self.file}: {where}" if self.file else where
        self.faults.append(fault(place, found, expected, cure))

    def rows(self) -> list[Change]:
        """All changes, those of neutral options as one."""
        if not self.neutral:
            return self.changes
        return [*self.changes, Change(", ".join(self.neutral), "left out", "neutral, vLLM's default")]
