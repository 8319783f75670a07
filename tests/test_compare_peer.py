"""The learning comparison with a peer: the clock, the intervals, and the proof that a head was read right."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from peagle_train.head.session import DraftSession
from peagle_train.store.states import StateRow, StateStore, StateWriter
from peagle_train.training.data import Draw
from scripts.compare_peer.learn import Job, learn, stream_of
from scripts.compare_peer.measure import CLOSE, probe_gap
from scripts.learning.acceptance import interval, length
from tests.head.toys import CONFIG, toy_head

SECONDS = 0.3


def a_job(**changes: Any) -> Job:
    fixed: dict[str, Any] = {name: "" for name in Job.__annotations__}
    numbers = dict(
        rows=[3, 5, 8],
        lengths=[4, 4, 4],
        seed=0,
        seconds=SECONDS,
        warmup=0.5,
        decay="linear",
        batch_tokens=8,
        clip_norm=1.0,
    )
    return Job(**{**fixed, **numbers, **changes})


class Burner:
    """A learner that only spends time."""

    def __init__(self) -> None:
        self.parameter = nn.Parameter(torch.zeros(3))
        self.optimizer = torch.optim.SGD([self.parameter], lr=0.5)
        self.rates: list[float] = []
        self.rows: list[int] = []

    def trained(self) -> list[nn.Parameter]:
        return [self.parameter]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return [self.optimizer]

    def step(self, draws: Sequence[Draw]) -> float:
        end = time.process_time() + 0.01
        while time.process_time() < end:
            pass
        self.rates.append(self.optimizer.param_groups[0]["lr"])
        self.rows += [draw.row for draw in draws]
        self.parameter.grad = torch.full((3,), 100.0)
        return 1.0

    def save(self, directory: Path) -> None:
        raise AssertionError("nothing is saved here")


def test_training_stops_by_the_clock_and_the_rate_follows_it() -> None:
    learner, job = Burner(), a_job()
    done = learn(learner, job)
    assert SECONDS <= done["cpu_seconds"] < SECONDS + 0.2
    assert done["steps"] == len(learner.rates) and done["trained"] == 3
    top = learner.rates.index(max(learner.rates))
    assert learner.rates[: top + 1] == sorted(learner.rates[: top + 1])
    assert learner.rates[top:] == sorted(learner.rates[top:], reverse=True)
    assert 0.4 < max(learner.rates) <= 0.5 and min(learner.rates) < 0.1
    assert 0.3 < top / len(learner.rates) < 0.7  # the rate rises for half of the time
    # The gradient was cut to the norm 1, so no step can move further than its rate.
    assert float(learner.parameter.detach().norm()) <= sum(learner.rates) * (1 + 1e-5)
    drawn = [draw.row for step in range(len(learner.rates)) for draw in stream_of(job).step(step)[0]]
    assert learner.rows == drawn


def test_equal_prompts_leave_nothing_to_chance() -> None:
    counts = torch.tensor([[10.0, 6.0]] * 7, dtype=torch.float64)
    assert length(counts) == pytest.approx(1.6)
    assert interval(counts) == pytest.approx((1.6, 1.6))
    assert interval(counts, counts) == pytest.approx((1.0, 1.0))


def test_an_interval_holds_what_a_share_of_draws_gives() -> None:
    # Half of the prompts accept all, half nothing: the mean of 100 draws varies with 0.5 / sqrt(100).
    counts = torch.tensor([[10.0, 10.0], [10.0, 0.0]] * 50, dtype=torch.float64)
    low, high = interval(counts)
    assert low == pytest.approx(1.5 - 1.96 * 0.05, abs=0.02)
    assert high == pytest.approx(1.5 + 1.96 * 0.05, abs=0.02)


def test_a_ratio_is_of_the_same_prompts() -> None:
    ours = torch.tensor([[10.0, 10.0], [10.0, 2.0]] * 50, dtype=torch.float64)
    theirs = torch.tensor(
        [[10.0, 5.0], [10.0, -4.0]] * 50, dtype=torch.float64
    )  # lengths 3/4 and 1/2 of ours
    low, high = interval(ours, theirs)
    ratio = length(ours) / length(theirs)
    assert low < ratio < high
    assert high - low < (interval(ours)[1] - interval(ours)[0]) / length(theirs)


def test_a_head_that_was_read_wrongly_shows_in_its_logits(tmp_path: Path) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens, width = 12, CONFIG.aux_width
    writer = StateWriter(tmp_path, "f", CONFIG.aux_layers, CONFIG.target_hidden_size, "float32")
    row = StateRow(
        row=0,
        set="validation",
        id="0",
        token_ids=torch.randint(4, 40, (tokens,), generator=generator),
        loss_mask=torch.arange(tokens) >= 4,
        aux=torch.randn(tokens - 1, width, generator=generator),
        last=torch.randn(tokens - 1, CONFIG.target_hidden_size, generator=generator),
        prompt_length=4,
    )
    writer.write_batch(0, [row])
    writer.seal()
    store, k, head = StateStore(tmp_path), 3, toy_head(dtype=torch.float32)
    anchors = (5, 6, 8)
    logits = [DraftSession(head).draft(row.token_ids[1 : a + 2], row.aux[: a + 1], k)[1] for a in anchors]
    # As the peer orders them: by depth, then by anchor; and a chain that its draw cut short.
    by_depth = torch.stack(logits, 1).flatten(0, 1)
    cut = torch.zeros(1, by_depth.shape[1])
    probe = {
        "logits": torch.cat([by_depth, cut]),
        "anchor": torch.tensor([*anchors * k, 9]),
        "depth": torch.tensor([*(d for d in range(k) for _ in anchors), 0]),
    }
    assert probe_gap(head, store, 0, probe, k) < 1e-5
    with torch.no_grad():
        head.fc.weight[0] += 0.1
    assert probe_gap(head, store, 0, probe, k) > CLOSE
