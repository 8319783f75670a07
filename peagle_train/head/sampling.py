"""COD, conditional drop-token sampling: which mask slots one training step pays for.

All trainable real slots (depth 0) are kept. Of N chains that have a trainable mask slot at all,
depth d keeps floor(max(r ** d, floor) * N), drawn uniformly from those kept at depth d - 1 and
still trainable at d: a kept chain is complete from its anchor on.

Example (paper, n = 16 slots, K = 4, r = 0.7, so N = 15): 16 + 10 + 7 + 5 = 38 elements instead
of 64.

Sampling is per document, from the document's own seed: packing, batch order and the number of
processes change nothing, and a resumed run draws what the first would have drawn.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def sample_depths(
    trainable: Tensor,
    positions: int,
    rate: float,
    floor: float = 0.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """How many elements of each chain are kept.

    Args:
        trainable: [S] int64, trainable elements per anchor (`alignment.trainable_depths`).
        positions: K, the elements of a full chain (1 real slot, K - 1 mask slots).
        rate: r in (0, 1].
        floor: least share kept at any depth, in [0, 1].
        generator: source of the draw; None draws from torch's default generator.

    Returns:
        [S] int64: (a, d) is kept iff d < result[a]. result <= min(trainable, positions).
    """
    if positions < 1:
        raise ValueError(f"positions is {positions}; a head drafts at least 1")
    if not 0.0 < rate <= 1.0 or not 0.0 <= floor <= 1.0:
        raise ValueError(f"rate {rate} must lie in (0, 1] and floor {floor} in [0, 1]")
    reach = trainable.clamp(max=positions)
    kept = reach.clamp(max=1)
    chains = int((reach > 1).sum())
    # One random order per document: keeping its first m is a uniform draw, and draws from it nest.
    order = torch.randperm(reach.shape[0], generator=generator)
    for depth in range(1, positions):
        # 1e-9 keeps 0.7 ** 2 * 100 = 48.999... at 49.
        wanted = math.floor(max(rate**depth, floor) * chains + 1e-9)
        candidates = order[(kept[order] == depth) & (reach[order] > depth)]
        kept[candidates[:wanted]] = depth + 1
    return kept


def kept_shares(positions: int, rate: float, floor: float = 0.0) -> list[float]:
    """The share of chains that a draw keeps at depths 1 .. K - 1, at most."""
    return [max(rate**depth, floor) for depth in range(1, positions)]


def full_depths(trainable: Tensor, positions: int) -> Tensor:
    """Every trainable element, as validation wants it: no draw, no randomness. Shapes as above."""
    return trainable.clamp(max=positions)


def document_generator(seed: int, epoch: int, row: int) -> torch.Generator:
    """The generator of one document in one epoch: the same on every machine and at every resume."""
    mixed = (seed * 0x9E3779B97F4A7C15 + epoch * 0xC2B2AE3D27D4EB4F + row * 0x165667B19E3779F9) % (1 << 63)
    return torch.Generator().manual_seed(mixed)
