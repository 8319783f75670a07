"""A store of 10,000 rows: it opens at once, and neither writing nor reading it gathers memory."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch

from peagle_train.store import StateRow, StateStore, StateWriter

ROWS, BATCH, TOKENS, AUX, HIDDEN = 10_000, 500, 24, (1, 2, 3), 32
MB = 1 << 20


class Memory:
    """Growth of the process since it was made, at its highest; what files it has mapped counts too."""

    def __init__(self) -> None:
        self.process = psutil.Process()
        self.start, self.most = self.process.memory_info().rss, 0

    def look(self) -> None:
        self.most = max(self.most, self.process.memory_info().rss - self.start)


def rows(batch: int) -> list[StateRow]:
    mask = torch.zeros(TOKENS, dtype=torch.bool)
    mask[4:] = True
    tokens = torch.arange(TOKENS)
    return [
        StateRow(
            row,
            "train" if row % 50 else "validation",
            f"p{row}",
            tokens,
            mask,
            torch.full((TOKENS - 1, len(AUX) * HIDDEN), float(row)),
            torch.full((TOKENS - 1, HIDDEN), -float(row)),
            4,
        )
        for row in range(batch * BATCH, (batch + 1) * BATCH)
    ]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, Memory]]:
    folder = tmp_path_factory.mktemp("many")
    build = StateWriter(folder, "f1", AUX, HIDDEN, "float32")
    build.write_batch(0, rows(0))  # what the first one imports and keeps is none of the growth
    memory = Memory()
    for batch in range(1, ROWS // BATCH):
        build.write_batch(batch, rows(batch))
        memory.look()
    build.seal()
    yield folder, memory


def test_writing_gathers_no_memory(written: tuple[Path, Memory]) -> None:
    folder, memory = written
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size > 100 * MB and memory.most < 24 * MB


def test_it_opens_in_less_than_half_a_second_of_a_core(written: tuple[Path, Memory]) -> None:
    best = min(_seconds(lambda: StateStore(written[0], expected="f1")) for _ in range(3))
    assert best < 0.5


@pytest.mark.parametrize("order", ["as they lie", "at random, announced"])
def test_reading_gathers_no_memory(written: tuple[Path, Memory], order: str) -> None:
    store = StateStore(written[0])
    every = list(range(ROWS))
    if order != "as they lie":
        every = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0)).tolist()
    store.read(0)
    memory = Memory()
    for place in range(0, ROWS, 100):
        some = every[place : place + 100]
        if order != "as they lie":
            store.upcoming(some)
        for row in some:
            found = store.read(row)
            assert float(found.aux[-1, -1]) == row == -float(found.last[0, 0])
        memory.look()
    store.close()
    assert memory.most < 24 * MB


def _seconds(action: object) -> float:
    started = time.process_time()
    action()  # type: ignore[operator]
    return time.process_time() - started
