"""What a check came to, and how checks are run."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from peagle_train.errors import PeagleError

Outcome = Literal["ok", "failure", "skipped"]

CHECK_FAILURES = (
    PeagleError,
    RuntimeError,
    ValueError,
    TypeError,
    AttributeError,
    LookupError,
    ImportError,
    OSError,
)
"""What foreign kernels and launchers may raise; also torch's own errors, out of memory among them."""


@dataclass(frozen=True)
class Line:
    """One check: its part and name, what it came to, and why or how well."""

    part: str
    name: str
    outcome: Outcome
    detail: str
    seconds: float = 0.0
    numbers: dict[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Settings:
    """device: "cuda" or "cpu". tiny: sizes for a quick test of the checks themselves."""

    device: str
    tiny: bool


class Skip(Exception):
    """Raised by a check that cannot run here, with the reason."""


class Failed(Exception):
    """Raised by a check that found something wrong, with what it found."""


Check = tuple[str, Callable[[], tuple[str, dict[str, Any]]]]
"""A name, and what to run: returns a detail and numbers, or raises Skip or Failed."""


def skip(reason: str) -> tuple[str, dict[str, Any]]:
    """A check that cannot run here."""
    raise Skip(reason)


def fail(found: str) -> tuple[str, dict[str, Any]]:
    """A check that could not be made."""
    raise Failed(found)


def run(part: str, checks: Iterator[Check]) -> Iterator[Line]:
    """Runs checks one after the other; none stops the others."""
    for name, check in checks:
        start = time.monotonic()
        outcome: Outcome = "ok"
        numbers: dict[str, Any] = {}
        try:
            detail, numbers = check()
        except Skip as reason:
            outcome, detail = "skipped", str(reason)
        except Failed as found:
            outcome, detail = "failure", str(found)
        except CHECK_FAILURES as error:
            said = str(error).strip().splitlines() or ["without a message"]
            outcome, detail = "failure", f"{type(error).__name__}: {said[0]}"
        yield Line(part, name, outcome, detail, round(time.monotonic() - start, 2), numbers)
