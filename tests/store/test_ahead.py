"""Reading ahead: what is announced is ready, memory is bounded, errors come where the row is asked for."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import pytest

from peagle_train.errors import CorruptError
from peagle_train.store import StateRow
from peagle_train.store.ahead import Ahead
from tests.store.rows import row


class Slow:
    """Rows of ten bytes each; row 7 is damaged. `read` tells which were read, in the order begun."""

    def __init__(self) -> None:
        self.read: list[int] = []
        self.threads: set[str] = set()
        self.go = threading.Event()
        self.go.set()

    def __call__(self, index: int) -> StateRow:
        self.read.append(index)
        self.threads.add(threading.current_thread().name)
        assert self.go.wait(10)
        if index == 7:
            raise CorruptError("row 7 is damaged")
        return row(index)


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def ahead(slow: Slow) -> Iterator[Ahead]:
    made = Ahead(slow, lambda index: 10, threads=2, budget=35)
    yield made
    slow.go.set()
    made.close()


def until(condition: object) -> None:
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:  # type: ignore[operator]
        time.sleep(0.001)
    assert condition()  # type: ignore[operator]


def test_announced_rows_are_read_before_they_are_asked_for_within_the_budget(
    ahead: Ahead, slow: Slow
) -> None:
    ahead.announce(range(6))
    until(lambda: len(slow.read) == 3)
    time.sleep(0.02)
    assert slow.read == [0, 1, 2] and ahead.held == 30  # three of ten fit into 35
    for index in range(6):
        assert ahead.take(index).row == index
        assert ahead.held <= 35
    assert sorted(slow.read) == list(range(6)) and ahead.held == 0
    assert threading.current_thread().name not in slow.threads


def test_rows_come_in_any_order_twice_and_unannounced(ahead: Ahead, slow: Slow) -> None:
    ahead.announce([1, 2, 1, 3, 4, 5])
    for index in (5, 1, 9, 1, 4, 2, 3):
        assert ahead.take(index).row == index
    assert sorted(slow.read) == [1, 1, 2, 3, 4, 5, 9] and ahead.held == 0


def test_an_error_comes_where_its_row_is_asked_for(ahead: Ahead) -> None:
    ahead.announce([6, 7, 8])
    assert ahead.take(6).row == 6
    with pytest.raises(CorruptError, match="row 7 is damaged"):
        ahead.take(7)
    assert ahead.take(8).row == 8


def test_a_row_larger_than_the_budget_is_read_alone(slow: Slow) -> None:
    ahead = Ahead(slow, lambda index: 100, threads=2, budget=35)
    ahead.announce([0, 1])
    until(lambda: slow.read == [0])
    assert ahead.take(0).row == 0 and ahead.take(1).row == 1
    ahead.close()


def test_close_ends_what_was_not_begun(ahead: Ahead, slow: Slow) -> None:
    slow.go.clear()
    ahead.announce(range(6))
    until(lambda: len(slow.read) == 2)
    slow.go.set()
    ahead.close()
    assert len(slow.read) <= 3 and ahead.take(5).row == 5
