"""The bar that moves while bytes do, and addresses fit to be printed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from urllib.parse import urlsplit, urlunsplit

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)


@contextmanager
def transfer_bar(console: Console, title: str, total: int) -> Iterator[Callable[[int], None]]:
    """Shows bytes done, rate and time left. Yields a function that is told how many more bytes are done.

    The function may be called from any thread.
    """
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task(title, total=total)

        def advance(count: int) -> None:
            progress.advance(task, count)

        yield advance


def printable(url: str) -> str:
    """An address without user name, password and query: signed addresses carry their key in the query."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


def without_queries(text: str) -> str:
    """A service's own message, every address in it made printable."""
    return re.sub(r"https?://[^\s'\"<>]+", lambda match: printable(match.group()), text)
