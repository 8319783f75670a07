"""A folder of pieces that were fetched from afar, of a size that is never exceeded.

    states/.cache/
      counter                bytes that lie here or are about to; its lock (flock) guards it and the clearing
      00000384-9f3c....      one piece: a row's states
      .00000384-9f3c....partial   one being written

Several processes may share it. A piece appears whole, by a rename. Who reads one holds a shared lock on the
file, and clearing takes only what it can lock alone, least recently used first: nothing goes that is open.
Whoever asks knows the checksum and proves what it gets, so a piece needs no flush and a harmed one is
fetched again. A piece that finds no room is passed on without being kept.
"""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

_COUNTER = "counter"
_PARTIAL = ".partial"
CLEAR_TO = 0.9
"""Clearing looks at every file, so it makes more room than is asked for, up to this share of the limit."""


class Cache:
    """Pieces by name.

    Args:
        directory: made if need be.
        limit: bytes that may lie in it.
    """

    def __init__(self, directory: Path, limit: int):
        self.directory, self.limit = directory, limit

    def get(self, name: str, fetch: Callable[[], bytearray], sound: Callable[[bytearray], bool]) -> bytearray:
        """A piece from here or, if it is not here or not sound, from afar; whatever `fetch` gave at last."""
        path = self.directory / name
        data = _read(path)
        if data is not None and sound(data):
            return data
        if data is not None:
            path.unlink(missing_ok=True)
        data = fetch()
        if sound(data):
            self._keep(path, data)
        return data

    def has(self, name: str) -> bool:
        """Whether the piece lies here."""
        return (self.directory / name).is_file()

    def _keep(self, path: Path, data: bytearray) -> None:
        with self._counted() as counter:
            if not self._make_room(counter, len(data)):
                return
            partial = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_ident()}{_PARTIAL}")
            # Locked while the counter is: clearing takes a partial without a lock for a killed writer's.
            descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            os.ftruncate(descriptor, len(data))  # whoever counts meanwhile counts all of it
            counter.value += len(data)
        with os.fdopen(descriptor, "wb") as file:
            try:
                file.write(data)
                file.flush()
                with self._counted():  # no file changes its name while another process counts them
                    partial.replace(path)
            except OSError:  # a full disk, say: the piece is passed on all the same
                partial.unlink(missing_ok=True)

    def _make_room(self, counter: _Counter, size: int) -> bool:
        """Clears the folder if `size` bytes do not fit; whether they fit now. Call it with the lock."""
        if counter.value + size <= self.limit:
            return True
        if size > self.limit:
            return False
        files = []
        for entry in os.scandir(self.directory):
            if entry.name != _COUNTER:
                with suppress(FileNotFoundError):  # renamed or taken away meanwhile
                    files.append((entry.name.endswith(_PARTIAL), entry.stat(), Path(entry.path)))
        lying = sum(stat.st_size for _, stat, _ in files)
        aim = max(0, int(CLEAR_TO * self.limit) - size)
        # Leftovers of killed writers first, then the least recently used.
        for _, stat, path in sorted(files, key=lambda file: (not file[0], file[1].st_mtime_ns)):
            if lying <= aim:
                break
            if _removed(path):
                lying -= stat.st_size
        counter.value = lying
        return lying + size <= self.limit

    @contextmanager
    def _counted(self) -> Iterator[_Counter]:
        self.directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.directory / _COUNTER, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            counter = _Counter(int(os.pread(descriptor, 32, 0) or b"0"))
            yield counter
            os.pwrite(descriptor, b"%-31d" % counter.value, 0)
        finally:
            os.close(descriptor)


class _Counter:
    def __init__(self, value: int):
        self.value = value


def _read(path: Path) -> bytearray | None:
    """The content of a piece, or None if it is not there."""
    try:
        with path.open("rb", buffering=0) as file:
            fcntl.flock(file, fcntl.LOCK_SH)
            data = bytearray(os.fstat(file.fileno()).st_size)
            file.readinto(data)
            with suppress(FileNotFoundError):
                os.utime(path)  # used just now
            return data
    except FileNotFoundError:
        return None


def _removed(path: Path) -> bool:
    """Removes a file unless somebody has it open under a lock."""
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
            return True
    except (BlockingIOError, FileNotFoundError):
        return False
