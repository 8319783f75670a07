"""One process at a time in a run's folder.

Two commands that write the same run would set each other's folders aside. The lock is the kernel's
(`flock` on a file), so it is gone the moment its owner is, however it died: there is no stale lock file
to delete by hand. Within one process a folder may be locked again and again, since a notebook may open
the same run twice.
"""

from __future__ import annotations

import fcntl
import os
import weakref
from pathlib import Path

from peagle_train.errors import PeagleError

_NAME = ".lock"


class _Held:
    """An open, locked file of this process, and how many `FolderLock`s share it."""

    def __init__(self, descriptor: int):
        self.descriptor = descriptor
        self.owner = os.getpid()
        self.users = 0


_held: dict[Path, _Held] = {}


class FolderLock:
    """Holds the lock of `folder` from construction to `release()`, or until it is garbage collected.

    Raises PeagleError, naming the other process, if another one works there.
    """

    def __init__(self, folder: Path):
        folder.mkdir(parents=True, exist_ok=True)
        self.folder = folder.resolve()
        self.take()

    def take(self) -> None:
        """Takes the lock, again after a `release`. Raises PeagleError as the constructor."""
        held = _held.get(self.folder)
        if held is None or held.owner != os.getpid():  # a forked child holds nothing of its own
            held = _held[self.folder] = _Held(_lock(self.folder))
        held.users += 1
        self._release = weakref.finalize(self, _leave, self.folder, held)

    def release(self) -> None:
        """Gives the lock back; a second call does nothing."""
        self._release()


def _lock(folder: Path) -> int:
    descriptor = os.open(folder / _NAME, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        owner = os.pread(descriptor, 32, 0).decode().strip()
        os.close(descriptor)
        raise PeagleError(
            f"{folder}: found another process at work here{f' (process {owner})' if owner else ''}; expected "
            "to be alone, because two would mix their outputs. Wait until it "
            "ends, or give this run another `name`."
        ) from None
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    return descriptor


def _leave(folder: Path, held: _Held) -> None:
    held.users -= 1
    if held.users or held.owner != os.getpid():
        return
    # Unlocked by name: closing alone would leave the lock with forked workers that are still alive.
    fcntl.flock(held.descriptor, fcntl.LOCK_UN)
    os.close(held.descriptor)
    if _held.get(folder) is held:
        del _held[folder]
