"""Which rows a step trains on."""

from __future__ import annotations

from collections import Counter

import pytest

from peagle_train.training.data import Stream
from peagle_train.training.schedule import learning_rate_at


def test_no_row_is_dropped_or_repeated_within_an_epoch() -> None:
    stream = Stream(range(10, 17), seed=3)
    draws = [draw for step in range(21) for draw in stream.step(step, rows=4)]  # 84 = 12 epochs of 7
    for epoch in range(12):
        assert Counter(d.row for d in draws if d.epoch == epoch) == Counter(range(10, 17))
    orders = {tuple(d.row for d in draws if d.epoch == epoch) for epoch in range(12)}
    assert len(orders) == 12


def test_a_step_is_a_pure_function_of_its_number() -> None:
    forwards, backwards = Stream(range(9), seed=1), Stream(range(9), seed=1)
    ahead = [forwards.step(s, 4) for s in range(8)]
    back = [backwards.step(s, 4) for s in reversed(range(8))]
    assert ahead == back[::-1]
    assert Stream(range(9), seed=2).step(0, 9) != Stream(range(9), seed=1).step(0, 9)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_processes_share_a_step(world: int) -> None:
    stream = Stream(range(20), seed=0)
    together = [d for rank in range(world) for d in stream.step(5, 6, rank, world)]
    assert Counter(d.row for d in together) == Counter(d.row for d in stream.step(5, 6))


def test_an_empty_set_is_an_error() -> None:
    with pytest.raises(ValueError, match="no training row"):
        Stream([], seed=0)


def test_learning_rate() -> None:
    def rates(decay: str) -> list[float]:
        return [
            learning_rate_at(s, peak=1.0, warmup_steps=2, total_steps=6, decay=decay)  # type: ignore[arg-type]
            for s in range(6)
        ]

    assert rates("constant") == [0.5, 1, 1, 1, 1, 1]
    assert rates("linear") == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    assert rates("cosine") == pytest.approx([0.5, 1.0, 1.0, 0.853553, 0.5, 0.146447], abs=1e-6)
