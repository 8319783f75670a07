"""What processes do together without one of them waiting for another that has failed.

An error in one process alone would leave the others in a collective until it times out. Here each hears of
it and raises too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from accelerate import Accelerator
from accelerate.utils import broadcast_object_list, gather_object

from peagle_train.errors import PeagleError

T = TypeVar("T")


class ElsewhereError(PeagleError):
    """Another process has failed, and tells why."""


def on_main(accelerator: Accelerator, action: Callable[[], T]) -> T:
    """Runs `action` in the main process; every process returns its result, or raises if it has failed."""
    if accelerator.num_processes == 1:
        return action()
    failure: PeagleError | OSError | None = None
    told: list[tuple[T | None, str | None]] = [(None, None)]
    if accelerator.is_main_process:
        try:
            told = [(action(), None)]
        except (PeagleError, OSError) as error:
            failure, told = error, [(None, str(error))]
    broadcast_object_list(told, from_process=0)
    if failure is not None:
        raise failure
    result, text = told[0]
    if text is not None:
        raise ElsewhereError(text)
    return result  # type: ignore[return-value]  # None only where T allows it


def everywhere(accelerator: Accelerator, action: Callable[[], T]) -> list[T]:
    """Runs `action` in every process; each returns the results of all, or raises if one has failed.

    Raises PeagleError: its own, an OSError among them, or an ElsewhereError with that of another process.
    """
    if accelerator.num_processes == 1:
        return [action()]
    failure: PeagleError | None = None
    outcome: tuple[T | None, str | None]
    try:
        outcome = (action(), None)
    except PeagleError as error:
        failure, outcome = error, (None, str(error))
    except OSError as error:
        failure = PeagleError(f"process {accelerator.process_index}: {error}")
        outcome = (None, str(failure))
    outcomes: list[tuple[T | None, str | None]] = gather_object([outcome])
    if failure is not None:
        raise failure
    for _, text in outcomes:
        if text is not None:
            raise ElsewhereError(text)
    return [result for result, _ in outcomes]  # type: ignore[misc]  # as above
