"""What acceptance figures mean: how sure they are, and where in an answer they come from.

Prompts, not drafts, are what a user has more of: drafts of one answer resemble each other, so an interval
that resamples them is too narrow.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch

from peagle_train.head.acceptance import Acceptance, Round

DRAWS = 2000
BUCKETS = (0, 64, 256, 1024, 4096, 16384)
"""Where buckets of places in an answer begin, in tokens: each four times as long as the one before."""


@dataclass(frozen=True)
class Interval:
    """Of the acceptance length, at 95 %: bounds, and the number of prompts behind them."""

    low: float
    high: float
    prompts: int


def bootstrap(counts: Sequence[Acceptance], draws: int = DRAWS, seed: int = 0) -> Interval | None:
    """The percentile interval of the acceptance length over resampled prompts.

    Prompts without a draft count for nothing. None where fewer than two have any: one prompt tells nothing of
    another. The same counts and seed give the same interval.
    """
    told = [one for one in counts if one.num_drafts]
    if len(told) < 2:
        return None
    drafts = torch.tensor([one.num_drafts for one in told], dtype=torch.float64)
    accepted = torch.tensor([one.num_accepted for one in told], dtype=torch.float64)
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.empty(draws, dtype=torch.float64)
    for draw in range(draws):  # a draw at a time: draws x prompts indices need not be held
        chosen = torch.randint(len(told), (len(told),), generator=generator)
        lengths[draw] = 1 + accepted[chosen].sum() / drafts[chosen].sum()
    low, high = torch.quantile(lengths, torch.tensor([0.025, 0.975], dtype=torch.float64)).tolist()
    return Interval(low, high, len(told))


def conditional(counts: Acceptance) -> list[float]:
    """Share of drafts whose token i held, among those in which all before it did; 0.0 where none got there.

    Tokens behind an answer's end count as not held, as in `Acceptance.per_position`.
    """
    reached = [counts.num_drafts, *counts.accepted_at[:-1]]
    return [held / of if of else 0.0 for held, of in zip(counts.accepted_at, reached, strict=True)]


def by_place(answers: Iterable[tuple[int, Sequence[Round]]], k: int) -> dict[int, Acceptance]:
    """Acceptance by where in its answer a draft was made.

    Args:
        answers: of each, the index of its first generated token, and its rounds.
        k: of the rounds.

    Returns:
        by the first token of the bucket (BUCKETS); buckets without a draft are left out.
    """
    found = {start: Acceptance(k) for start in BUCKETS}
    for first, rounds in answers:
        for one in rounds:
            place = one.anchor + 2 - first  # of the first drafted token
            found[max(start for start in BUCKETS if start <= place)].add_round(one.accepted)
    return {start: counts for start, counts in found.items() if counts.num_drafts}
