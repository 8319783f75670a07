"""What a process that this package starts does first: report on its own stream, end with its parent."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from typing import Any


def reports_to_parent() -> Callable[..., None]:
    """A function that sends its keyword arguments to the parent as one JSON line of standard output.

    Whatever a library prints from now on goes to standard error: it must not be taken for a report.
    """
    stream = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)

    def say(**report: Any) -> None:
        print(json.dumps(report), file=stream, flush=True)

    return say


def end_with_parent() -> None:
    """Ends this process once its parent is gone, even killed: nobody would read its reports or stop it."""
    threading.Thread(target=_follow, args=(os.getppid(),), daemon=True).start()


def _follow(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)
