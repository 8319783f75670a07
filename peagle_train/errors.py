"""Errors that users see.

Every message says what was found, what was expected, and what to do. The command line prints
them without a traceback; Python callers catch `PeagleError`.
"""

from __future__ import annotations


class PeagleError(Exception):
    """A fault in the input or the surroundings that the user can mend."""

    exit_code = 1
    """With which a command leaves that ends with this error."""


class FaultsError(PeagleError):
    """All faults of one source at once, one line each."""

    def __init__(self, source: str, faults: list[str]):
        self.source = source
        self.faults = faults
        noun = "fault" if len(faults) == 1 else "faults"
        super().__init__(f"{source}: {len(faults)} {noun}\n" + "\n".join(f"  {fault}" for fault in faults))


class RecipeError(FaultsError):
    """All faults of one recipe: file and line, key, found, expected, cure."""

    exit_code = 2


class StaleError(PeagleError):
    """A stored artefact was made from other inputs than the ones asked for."""


class CorruptError(PeagleError):
    """A stored artefact differs from its own checksum or format."""
