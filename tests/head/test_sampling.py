"""COD sampling: the paper's example, and properties by brute force."""

from __future__ import annotations

import math

import pytest
import torch

from peagle_train.head import sampling
from peagle_train.head.alignment import trainable_depths
from peagle_train.head.sampling import document_generator, full_depths, sample_depths

# Depth d of the paper's figure: positions p = a + d that are kept (n = 16, K = 4, r = 0.7).
FIGURE = {1: {1, 3, 4, 6, 7, 9, 10, 12, 14, 15}, 2: {2, 5, 7, 8, 11, 13, 15}, 3: {3, 6, 9, 12, 14}}


def test_the_papers_figure(monkeypatch: pytest.MonkeyPatch) -> None:
    """16 + 10 + 7 + 5 = 38 elements, and the figure's own draw is a possible one."""
    anchors = {d: {p - d for p in kept} for d, kept in FIGURE.items()}
    depth_of = [max((d for d in anchors if a in anchors[d]), default=0) for a in range(16)]
    order = sorted(range(16), key=lambda a: -depth_of[a])
    monkeypatch.setattr(sampling.torch, "randperm", lambda n, generator=None: torch.tensor(order))
    # Slot 15 ends the sequence: its chain has no mask slot, which leaves 15 chains.
    trainable = torch.tensor([4] * 15 + [1])
    kept = sample_depths(trainable, positions=4, rate=0.7)
    for depth, positions in FIGURE.items():
        assert {a + depth for a in range(16) if kept[a] > depth} == positions
    assert int(kept.sum()) == 38


@pytest.mark.parametrize("rate,floor", [(0.8, 0.0), (0.5, 0.2), (1.0, 0.0), (0.3, 0.0)])
@pytest.mark.parametrize("positions", [1, 2, 5, 8])
def test_properties(rate: float, floor: float, positions: int) -> None:
    for seed in range(60):
        generator = torch.Generator().manual_seed(seed)
        mask = torch.rand(40, generator=generator) < 0.85
        trainable = trainable_depths(mask)
        kept = sample_depths(trainable, positions, rate, floor, generator)
        assert bool((kept <= trainable.clamp(max=positions)).all())  # only what is trainable
        assert bool(((kept > 0) == (trainable > 0)).all())  # depth 0 is whole
        chains = int((trainable.clamp(max=positions) > 1).sum())
        above = int((kept > 0).sum())
        for depth in range(1, positions):
            now = int((kept > depth).sum())
            wanted = math.floor(max(rate**depth, floor) * chains + 1e-9)
            could = int(((kept >= depth) & (trainable > depth)).sum())
            assert now == min(wanted, could)
            assert now <= above
            above = now


def test_every_chain_is_equally_likely() -> None:
    trainable = torch.full((10,), 9)
    counts = torch.zeros(10)
    draws = 3000
    for seed in range(draws):
        counts += (
            sample_depths(trainable, 3, 0.5, generator=torch.Generator().manual_seed(seed)) > 2
        ).float()
    # floor(0.25 * 10) = 2 of 10 reach depth 2; four standard deviations of a binomial.
    expected, sigma = 0.2, math.sqrt(0.2 * 0.8 / draws)
    assert bool(((counts / draws - expected).abs() < 4 * sigma).all()), counts / draws


def test_draws_depend_on_seed_epoch_and_row_alone() -> None:
    trainable = torch.full((30,), 5)

    def draw(seed: int, epoch: int, row: int) -> list[int]:
        return sample_depths(trainable, 5, 0.8, generator=document_generator(seed, epoch, row)).tolist()

    assert draw(1, 2, 3) == draw(1, 2, 3)
    assert len({tuple(draw(s, e, r)) for s in range(2) for e in range(3) for r in range(3)}) == 18


def test_full_depths_keeps_everything() -> None:
    assert full_depths(torch.tensor([0, 1, 7]), 4).tolist() == [0, 1, 4]


def test_impossible_values() -> None:
    for bad in (
        {"positions": 0, "rate": 0.5},
        {"positions": 2, "rate": 0.0},
        {"positions": 2, "rate": 0.5, "floor": 2.0},
    ):
        with pytest.raises(ValueError):
            sample_depths(torch.tensor([1]), **bad)  # type: ignore[arg-type]
