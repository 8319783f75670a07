"""How long the rows of a run will be, from the best that is known.

    finished answers of this recipe        exact
    lengths that somebody measured         target/known: a log-normal with their median and ninth decile,
                                           cut at data.max_new_tokens
    the recipe's bounds                    every row as long as it may be

Prompts count in full, with data.max_prompt_tokens, until they have been answered. With `data.turns: each` a
conversation is one row, as it is where its history is rendered as it was generated, and all of it answers.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import NormalDist

from peagle_train.errors import PeagleError
from peagle_train.recipe.data import DataSection, PromptSet
from peagle_train.recipe.schema import Recipe
from peagle_train.run import FOLDERS, run_directory
from peagle_train.stages import read_record
from peagle_train.store.answers import AnswerStore
from peagle_train.target.known import AnswerTokens

SAMPLE, ALIKE = 1000, 64
"""Rows that stand for all of a set: of many lengths, or all of one, enough of them to be packed."""

_DECIDE_LENGTHS = (
    "train",
    "validation",
    "heldout",
    "template_variables",
    "turns",
    "sampling",
    "max_prompt_tokens",
    "max_new_tokens",
)
_NINTH_DECILE = NormalDist().inv_cdf(0.9)


@dataclass(frozen=True)
class SetLengths:
    """The rows of one set.

    rows: how many; None: as many as the source has, which nobody knows before it is read.
    sample: (prompt, answer) tokens of rows that stand for all.
    most: of a prompt and an answer.
    cut: share of the answers that end at data.max_new_tokens; None: unknown.
    """

    rows: int | None
    sample: Sequence[tuple[int, int]]
    most: tuple[int, int]
    cut: float | None

    @property
    def mean_answer(self) -> float:
        return sum(answer for _, answer in self.sample) / len(self.sample)

    @property
    def mean_row(self) -> float:
        return sum(map(sum, self.sample)) / len(self.sample)

    @property
    def longest(self) -> int:
        """Tokens of the longest row that may come."""
        return sum(self.most)

    def total(self, per_row: float) -> float:
        """Of all rows together; 0 where their number is unknown."""
        return per_row * (self.rows or 0)


@dataclass(frozen=True)
class Lengths:
    """Every set of a run.

    source: where the lengths come from, for people; exact: they are the answers' own.
    """

    sets: dict[str, SetLengths]
    source: str
    exact: bool = False

    @property
    def train(self) -> SetLengths:
        return self.sets["train"]

    @property
    def unknown(self) -> list[str]:
        """Sets of which nobody knows how many rows they have."""
        return [name for name, rows in self.sets.items() if rows.rows is None]


def lengths_of(recipe: Recipe, measured: AnswerTokens | None) -> Lengths:
    """The lengths of a recipe's rows. measured: of its target's answers, if anybody did."""
    found = _answered(recipe)
    if found is not None:
        return found
    data = recipe.data
    if measured is None:
        answers, cut = [data.max_new_tokens] * ALIKE, None
        source = "the recipe's bounds: every row as long as it may be"
    else:
        answers, cut = _drawn(measured, data.max_new_tokens)
        source = (
            f"answers as measured, median {measured.median:,.0f} and ninth decile {measured.p90:,.0f} "
            f"tokens ({measured.source}); prompts as long as they may be"
        )
    most = (data.max_prompt_tokens, data.max_new_tokens)
    sample = [(data.max_prompt_tokens, answer) for answer in answers]
    if data.turns == "each":
        source += (
            "; a conversation is one row, all of it answers (where a template drops earlier thoughts, each "
            "answer has a row)"
        )
        most, *sample = [(1, prompt - 1 + answer) for prompt, answer in (most, *sample)]
    return Lengths(
        {name: SetLengths(_count(part), sample, most, cut) for name, part in _sets(data).items()}, source
    )


def cut_share(measured: AnswerTokens, most: int) -> float:
    """Share of the answers that are longer than `most` tokens."""
    return 1 - _normal(measured).cdf(math.log(most))


def _normal(measured: AnswerTokens) -> NormalDist:
    """Of the logarithm of an answer's length."""
    middle = math.log(measured.median)
    return NormalDist(middle, (math.log(measured.p90) - middle) / _NINTH_DECILE)


def _drawn(measured: AnswerTokens, most: int) -> tuple[list[int], float]:
    """Lengths at even steps of the distribution, cut at `most`, and the share that is cut."""
    normal = _normal(measured)
    lengths = [math.exp(normal.inv_cdf((place + 0.5) / SAMPLE)) for place in range(SAMPLE)]
    return [max(2, min(most, round(length))) for length in lengths], cut_share(measured, most)


def _answered(recipe: Recipe) -> Lengths | None:
    """The lengths of finished answers, if the keys that decide them are still the recipe's."""
    folder = run_directory(recipe) / FOLDERS["prepare"]
    try:
        record = read_record(folder)
        if record is None or record.finished is None:
            return None
        now, then = recipe.data.model_dump(mode="json"), record.parts["data"]
        if any(now[key] != then[key] for key in _DECIDE_LENGTHS):
            return None
        store = AnswerStore(folder)
    except (PeagleError, KeyError):
        return None  # damaged, or of another version: `prepare` will say so, a plan can do without
    sets: dict[str, list[tuple[int, int]]] = {}
    cut: dict[str, int] = {}
    for batch in store.stream():
        for row in batch:
            sets.setdefault(row.set, []).append((len(row.token_ids) - row.supervised, row.supervised))
            cut[row.set] = cut.get(row.set, 0) + (row.finish == "length")
    if "train" not in sets:
        return None
    found = {
        name: SetLengths(len(rows), rows, max(rows, key=sum), cut[name] / len(rows))
        for name, rows in sets.items()
    }
    return Lengths(found, f"the answers in {folder}", exact=True)


def _sets(data: DataSection) -> dict[str, PromptSet]:
    return {"train": data.train, "validation": data.validation, **data.heldout}


def _count(part: PromptSet) -> int | None:
    return part.count
