"""What the results say: gains over the base, the winner of each group, the combination of the winners."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from peagle_train.errors import RecipeError
from scripts.ablate.grid import COMBINATION, Source, Variant
from scripts.learning.acceptance import interval, length

Interval = tuple[float, float]

BY_HAND = ("k",)
"""Groups without a winner: what K should be is for whoever serves the head, not for two minutes' length."""


@dataclass(frozen=True)
class Measured:
    """A variant beside the base, on one set.

    length, between: acceptance length over all seeds and its 95 %. gain, gain_between: difference from the
    base over the same prompts and its 95 %. by_seed: that difference seed by seed.
    """

    length: float
    between: Interval
    gain: float
    gain_between: Interval
    by_seed: tuple[float, ...]

    @property
    def better(self) -> bool:
        """Beyond chance of prompts, and whatever the seed."""
        return self.gain_between[0] > 0 and min(self.by_seed) > 0

    @property
    def worse(self) -> bool:
        return self.gain_between[1] < 0 and max(self.by_seed) < 0


def measured(counts: Sequence[Tensor], base: Sequence[Tensor]) -> Measured:
    """A variant's counts [prompts, 2] seed by seed, and the base's in the same order of seeds and prompts.

    Seeds are added up prompt by prompt: prompts are what is drawn again, and a prompt's difference keeps what
    both heads share of its difficulty.
    """
    all_, base_all = torch.stack(list(counts)).sum(0), torch.stack(list(base)).sum(0)
    return Measured(
        length=length(all_),
        between=interval(all_),
        gain=length(all_) - length(base_all),
        gain_between=interval(all_, base_all, by="difference"),
        by_seed=tuple(length(mine) - length(its) for mine, its in zip(counts, base, strict=True)),
    )


def winners(variants: Sequence[Variant], results: Mapping[str, Measured]) -> list[Variant]:
    """The variant of each group that gains most, of those that are better than the base; best group first.

    Groups BY_HAND have none.

    results: by the variant's name, on the set that chooses.
    """
    best: dict[str, Variant] = {}
    for variant in variants:
        if variant.group in BY_HAND or not results[variant.name].better:
            continue
        standing = best.get(variant.group)
        if standing is None or results[variant.name].gain > results[standing.name].gain:
            best[variant.group] = variant
    return sorted(best.values(), key=lambda variant: -results[variant.name].gain)


def combined(source: Source, chosen: Sequence[Variant]) -> tuple[Variant, list[Variant]]:
    """All winners at once, and those that had to be left out because they do not go with better ones."""
    overrides: tuple[str, ...] = ()
    left: list[Variant] = []
    for variant in chosen:
        together = (*overrides, *(o for o in variant.overrides if o not in overrides))
        try:
            source.recipe(together)
        except RecipeError:
            left.append(variant)
        else:
            overrides = together
    return Variant(COMBINATION, COMBINATION, overrides), left
