"""SIGTERM and SIGINT during training: the first asks for a stop, a second one ends the process at once.

A step may spend half a minute inside one call of torch, where Python's own handlers wait. So a thread
reads the signals from a pipe that the interpreter's C handler writes to: the user has an answer at once, and
a second signal needs no leave of the main thread. Nothing is lost by that end: files appear whole or not at
all.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from peagle_train.errors import PeagleError

STOPS = (signal.SIGTERM, signal.SIGINT)

SAME = 1.0
"""Seconds in which further signals count as the first one: a launcher passes on what the terminal has already
sent to the whole group."""


class StoppedError(PeagleError):
    """A signal stopped the work, which is saved. Leaves with 128 + the signal's number, as shells expect."""

    def __init__(self, message: str, number: int):
        super().__init__(message)
        self.number, self.exit_code = number, 128 + number


class StopSignals:
    """Listens for the length of a `with` block; outside the main thread, where Python allows it not, to none.

    Attributes:
        number: of the signal that asked for the stop; 0: none.
    """

    def __init__(self, console: Console):
        self.number = 0
        self._console, self._since = console, 0.0
        self._before: dict[signal.Signals, Any] = {}

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            self._reader, self._writer = os.pipe()
            os.set_blocking(self._writer, False)
            self._fd_before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
            self._before = {stop: signal.signal(stop, lambda *_: None) for stop in STOPS}
            self._thread = threading.Thread(target=self._listen, name="stop signals", daemon=True)
            self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._before:
            for stop, handler in self._before.items():
                signal.signal(stop, handler)
            signal.set_wakeup_fd(self._fd_before)
            os.close(self._writer)
            self._thread.join()
            os.close(self._reader)
            if self.number and not isinstance(error, StoppedError):
                os.kill(os.getpid(), self.number)  # it came too late to be heeded here

    def _listen(self) -> None:
        while heard := os.read(self._reader, 1):
            if heard[0] in STOPS:
                self._hear(signal.Signals(heard[0]))

    def _hear(self, stop: signal.Signals) -> None:
        if not self.number:
            self._since, self.number = time.monotonic(), int(stop)
            self._console.print(
                f"{stop.name}: this step is finished and saved; a second signal ends at once", style="yellow"
            )
        elif time.monotonic() - self._since > SAME:
            self._console.show_cursor(True)
            os._exit(128 + stop)
