"""The progress bar of training."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn


@contextmanager
def bar(console: Console, done: int, total: int, *, shown: bool) -> Iterator[Callable[..., None]]:
    """Yields a function that advances the bar by one step: it takes loss, tokens per second and best."""
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[rate]} tokens/s"),
        TextColumn("best acceptance {task.fields[best]}"),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=console, disable=not shown) as progress:
        task = progress.add_task("train", total=total, completed=done, loss="–", rate="–", best="–")

        def advance(*, loss: float, rate: float, best: float) -> None:
            progress.update(task, advance=1, loss=f"{loss:.3f}", rate=f"{rate:,.0f}", best=f"{best:.3f}")

        yield advance
