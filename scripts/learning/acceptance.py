"""Acceptance of a head by prompt, and how far it could have come out otherwise."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from peagle_train.head.acceptance import offline_acceptance
from peagle_train.head.model import DrafterHead
from peagle_train.store.documents import Documents
from peagle_train.store.states import StateStore

ROWS_AT_ONCE = 8
RESAMPLES = 2000


def counts_by_prompt(head: DrafterHead, store: StateStore, set_name: str, k: int) -> Tensor:
    """[prompts, 2] drafts and accepted tokens on a set's stored answers."""
    documents, rows = Documents(store, k), [info.row for info in store.info(set_name)]
    counts = [
        (one.num_drafts, one.num_accepted)
        for first in range(0, len(rows), ROWS_AT_ONCE)
        for one in offline_acceptance(
            head, [documents.full(r) for r in rows[first : first + ROWS_AT_ONCE]], k
        )
    ]
    return torch.tensor(counts, dtype=torch.float64)


def length(counts: Tensor) -> float:
    """Acceptance length of [prompts, 2] counts."""
    return float(_lengths(counts.sum(0)))


def interval(
    counts: Tensor, against: Tensor | None = None, by: Literal["ratio", "difference"] = "ratio"
) -> tuple[float, float]:
    """95 % of the acceptance length, prompts drawn with replacement; with `against`, of what is told `by`.

    counts, against: [prompts, 2] of the same prompts in the same order: each draw takes the same from both.
    """
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(counts.shape[0], (RESAMPLES, counts.shape[0]), generator=generator)
    values = _lengths(counts[drawn].sum(1))
    if against is not None:
        others = _lengths(against[drawn].sum(1))
        values = values / others if by == "ratio" else values - others
    low, high = torch.quantile(values, torch.tensor([0.025, 0.975], dtype=values.dtype)).tolist()
    return low, high


def _lengths(sums: Tensor) -> Tensor:
    """1 + accepted / drafts of [..., 2]; 1 where nothing was drafted."""
    return 1 + sums[..., 1] / sums[..., 0].clamp(min=1)
