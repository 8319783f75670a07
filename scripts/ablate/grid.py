"""The variants: each changes one thing of the base recipe."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from peagle_train.errors import PeagleError
from peagle_train.recipe import Recipe, check_against_target, read_recipe
from peagle_train.target.facts import TargetFacts

BASE, COMBINATION = "base", "combination"


@dataclass(frozen=True)
class Variant:
    """What is trained in place of the base: overrides of the recipe, as `a.b=c`."""

    group: str
    name: str
    overrides: tuple[str, ...] = ()


@dataclass(frozen=True)
class Source:
    """A recipe on disk with what is put over it before any variant, and the sizes of its target."""

    path: str
    overrides: tuple[str, ...]
    facts: TargetFacts

    def recipe(self, more: Iterable[str] = ()) -> Recipe:
        """The recipe with more overrides. Raises RecipeError if they make no valid one for the target."""
        loaded = read_recipe(self.path, [*self.overrides, *more])
        check_against_target(loaded.recipe, self.facts, loaded.places.source, loaded.places)
        return loaded.recipe


def variants(source: Source) -> list[Variant]:
    """Every variant that differs from the base, group by group; of the base's own values there is none."""
    base = source.recipe()
    batch, rate, k = base.train.batch_tokens, base.train.learning_rate, base.evaluate.k
    # Random output rows cannot stay as they are: beside a frozen matrix this variant trains it.
    trained = ("head.output=trained",) if base.head.output == "frozen" else ()
    grid: dict[str, list[tuple[str, ...]]] = {
        "initialise": [("head.initialise=target",), ("head.initialise=random", *trained)],
        "batch": [(f"train.batch_tokens={n}",) for n in (batch // 2, batch, 2 * batch, 4 * batch)],
        "learning_rate": [(f"train.learning_rate={r:g}",) for r in (rate / 2, rate, 2 * rate)],
        "layers": [(f"head.layers={n}",) for n in (1, 2, 4)],
        "embeddings": [("head.embeddings=shared",), ("head.embeddings=own",)],
        "output": [("head.output=trained",), ("head.output=frozen",)],
        "loss": [("train.loss=kl",), ("train.loss=ce",)],
        "rate": [(f"train.cod.rate={r}",) for r in (0.4, 0.6, 0.8, 1.0)],
        "floor": [(f"train.cod.floor={f}",) for f in (0.0, 0.2)],
        "k": [(f"train.positions={p}", f"evaluate.k={min(k, p)}") for p in (3, 5, 8)],
        "vocabulary": [(f"head.draft_vocab_size={n}",) for n in (4096, 8192, 16384, "")],
    }
    return [
        Variant(group, _name(overrides[0]), overrides)
        for group, choices in grid.items()
        for overrides in choices
        if source.recipe(overrides) != base
    ]


def only(all_variants: list[Variant], groups: list[str]) -> list[Variant]:
    """The variants of some groups. Raises PeagleError for a group that does not exist."""
    known = list(dict.fromkeys(v.group for v in all_variants))
    unknown = [group for group in groups if group not in known]
    if unknown:
        raise PeagleError(f"--only: found {', '.join(unknown)}; expected some of {', '.join(known)}")
    return [v for v in all_variants if v.group in groups]


def _name(override: str) -> str:
    """`layers=2`: the last part of the key, and the value."""
    key, _, value = override.partition("=")
    return f"{key.rpartition('.')[2]}={value or 'all'}"


def folder_name(text: str) -> str:
    """A name that every file system takes."""
    return re.sub(r"[^A-Za-z0-9.]+", "-", text)
