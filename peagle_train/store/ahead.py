"""Rows that will be asked for, read by threads meanwhile, within a budget of memory.

upcoming(rows) ──► queue ── while the budget has room ──► threads ──► ready
read(row)      ◄───────────────────────────────────────────────────── the same row, or its error
"""

from __future__ import annotations

import threading
from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from peagle_train.store.rows import StateRow


class Ahead:
    """Reads rows by `read`, those that were announced in threads.

    Args:
        read: reads a row; called from any thread.
        size: bytes of a row in memory.
        threads: that read.
        budget: bytes of rows that are read and not asked for yet; one row is read whatever its size.
    """

    def __init__(
        self, read: Callable[[int], StateRow], size: Callable[[int], int], threads: int, budget: int
    ):
        self._read, self._size, self._threads, self._budget = read, size, threads, budget
        self._lock = threading.Lock()
        self._queue: deque[int] = deque()
        self._begun: dict[int, deque[Future[StateRow]]] = defaultdict(deque)
        self._held = 0  # bytes of what is begun
        self._pool: ThreadPoolExecutor | None = None

    @property
    def held(self) -> int:
        """Bytes of rows that are read, or being read, and were not asked for yet."""
        return self._held

    def announce(self, rows: Sequence[int]) -> None:
        """These will be asked for, in this order, each once."""
        with self._lock:
            self._queue += rows
            self._begin()

    def take(self, row: int) -> StateRow:
        """The row. Raises what reading it raised."""
        with self._lock:
            future = self._begun[row].popleft() if self._begun.get(row) else None
            if future is None:
                if row in self._queue:
                    self._queue.remove(row)
            elif not self._begun[row]:
                del self._begun[row]
        if future is None:
            return self._read(row)
        try:
            return future.result()
        finally:
            with self._lock:
                self._held -= self._size(row)
                self._begin()

    def close(self) -> None:
        """Nothing is read ahead any more."""
        with self._lock:
            self._queue.clear()
            self._begun.clear()
            self._held = 0
            pool, self._pool = self._pool, None
        if pool is not None:
            pool.shutdown(cancel_futures=True)

    def _begin(self) -> None:
        """Starts what has room. Call it under the lock."""
        while self._queue and (not self._held or self._held + self._size(self._queue[0]) <= self._budget):
            row = self._queue.popleft()
            if self._pool is None:
                self._pool = ThreadPoolExecutor(self._threads, "states")
            self._held += self._size(row)
            self._begun[row].append(self._pool.submit(self._read, row))
