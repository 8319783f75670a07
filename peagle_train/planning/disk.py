"""Bytes that a run leaves on the disk of its folder, and how many are free there."""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from peagle_train.planning.head import HeadPlan
from peagle_train.planning.lengths import Lengths, SetLengths
from peagle_train.recipe.schema import Recipe
from peagle_train.run import run_directory
from peagle_train.store.rows import stored_bytes_at_most
from peagle_train.target.facts import TargetFacts

GB = 1e9
ANSWER_BYTES = 16
"""Of a token in the answers store, as JSON text, with its share of the prompt."""


@dataclass(frozen=True)
class Disk:
    """Bytes below `output`, expected and at most.

    Attributes:
        answers, states, training: expected.
        states_at_most: if every row were as long as it may be.
        free: on the disk of `output`.
        elsewhere: URL that keeps the states, which then take no room here.
        mode: `states.mode`.
    """

    answers: int
    states: int
    states_at_most: int
    training: int
    free: int
    elsewhere: str | None
    mode: str

    @property
    def needed(self) -> int:
        """Expected on this disk."""
        return self.answers + self.training + (0 if self.elsewhere else self.states)

    @property
    def needed_at_most(self) -> int:
        return self.needed + (0 if self.elsewhere else self.states_at_most - self.states)


def disk_of(recipe: Recipe, facts: TargetFacts, head: HeadPlan, lengths: Lengths) -> Disk:
    """The disk a recipe needs. Sets of unknown size count as nothing; `Lengths.unknown` names them."""
    aux, width, dtype = len(recipe.head.aux_layers), facts.hidden_size, recipe.states.dtype

    def row(prompt: int, answer: int) -> int:
        return stored_bytes_at_most(prompt + answer, answer, aux, width, dtype)

    def states(rows: SetLengths) -> float:
        return rows.total(sum(row(*lengths) for lengths in rows.sample) / len(rows.sample))

    expected = sum(states(rows) for rows in lengths.sets.values())
    most = expected if lengths.exact else sum(r.total(row(*r.most)) for r in lengths.sets.values())
    if recipe.states.mode == "online":
        expected = most = 0
    elif recipe.states.mode == "bounded":
        cap = (recipe.states.cap or 0) * GB
        expected, most = min(expected, cap), min(most, cap)
    answers = sum(rows.total(rows.mean_row * ANSWER_BYTES) for rows in lengths.sets.values())
    moments = 2 * 4 * head.trained
    # As training/checkpoint.py asks for it: so many checkpoints and one more, the best head and its
    # successor.
    training = (recipe.train.keep_checkpoints + 1) * (head.weights + moments) + 2 * head.weights
    return Disk(
        answers=int(answers),
        states=int(expected),
        states_at_most=int(most),
        training=training + head.exported,
        free=shutil.disk_usage(_existing(run_directory(recipe).absolute())).free,
        elsewhere=recipe.states.url,
        mode=recipe.states.mode,
    )


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
