"""How a fault of a head directory is put into words: where, what was found, what was expected, what to do."""

from __future__ import annotations

import reprlib
from pathlib import Path
from typing import Any

_SHORT = reprlib.Repr()
_SHORT.maxlevel, _SHORT.maxlist, _SHORT.maxdict = 3, 32, 6
_SHORT.maxstring, _SHORT.maxlong, _SHORT.maxother = 80, 40, 80

AGAIN = "export again"
REMOVE_KEY = "remove the key"
OWN_TARGET = "is this the head's own target?"


def fault(where: str, found: str, expected: str, cure: str = AGAIN) -> str:
    """One line about one key or tensor."""
    return f"{where}: {found}; expected {expected}; {cure}"


def brief(value: Any) -> str:
    """`repr(value)`, cut in length and depth: values of a stranger's file may be anything."""
    return _SHORT.repr(value)


def what_stands_at(path: Path) -> str:
    """In words, for a path where a folder belongs."""
    if path.is_file():
        return f"a file of {path.stat().st_size:,} bytes"
    if path.exists():
        return "something that is neither a file nor a folder"
    return "a link that leads nowhere" if path.is_symlink() else "no such folder"


def under(section: dict[str, Any], key: str) -> str:
    """What stands under a key: its value, or `missing`."""
    return brief(section[key]) if key in section else "missing"
