"""What is examined, what the checks found out about it so far, and how a finding is told."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from peagle_train.recipe import LoadedRecipe
from peagle_train.recipe.data import PromptSet
from peagle_train.recipe.schema import Recipe
from peagle_train.run import Run

if TYPE_CHECKING:
    from torch import Tensor

    from peagle_train.head.model import DrafterHead
    from peagle_train.store import AnswerRow, StateStore
    from peagle_train.target.adapter import Target
    from peagle_train.target.facts import TargetFacts
    from peagle_train.training.loop import Loop

Level = Literal["ok", "warning", "failure", "not run"]

PROMPTS = {"train": 6, "validation": 2}
HELDOUT = 1
NEW_TOKENS = 32
STEPS = 2
"""Of training: a norm in front of weights that start at zero moves in the second step only."""


class Line(NamedTuple):
    """A finding. cure: what to do, where something is to be done."""

    level: Level
    text: str
    cure: str = ""


def ok(text: str) -> Line:
    return Line("ok", text)


def warning(text: str, cure: str) -> Line:
    return Line("warning", text, cure)


def failure(text: str, cure: str) -> Line:
    return Line("failure", text, cure)


@dataclass
class Patient:
    """A recipe under examination.

    Attributes:
        loaded: the recipe, and where its values were written.
        room: temporary folder; all that is written goes there.
        weights: whether the target may be loaded.
        colour: whether marked rows are coloured; else they are marked by signs.
        shown: rows with their supervised tokens marked, to be printed after the findings.

    What the checks leave for those after them; each is there once the check named has passed:
        facts (target config), folder and tokenizer (target files), asked and renderer (prompts),
        mask_token_id (mask token), target (target loads, until the training steps), rows and store (answers),
        loop, head, before and table (training steps), exported (export).
    """

    loaded: LoadedRecipe
    room: Path
    weights: bool
    colour: bool = False
    facts: TargetFacts = field(init=False)
    folder: Path = field(init=False)
    tokenizer: Any = field(init=False)
    end_token_ids: tuple[int, ...] = field(init=False)
    renderer: Any = field(init=False)
    asked: list[Any] = field(init=False)  # data_prep.chat.Rendered
    mask_token_id: int | None = field(init=False)
    target: Target | None = None
    rows: list[AnswerRow] = field(init=False)
    store: StateStore = field(init=False)
    loop: Loop = field(init=False)
    head: DrafterHead = field(init=False)
    before: dict[str, Tensor] = field(init=False)  # its weights before the steps
    table: Tensor = field(init=False)
    exported: Path = field(init=False)
    shown: list[Any] = field(default_factory=list)

    @property
    def recipe(self) -> Recipe:
        return self.loaded.recipe

    @property
    def small(self) -> Recipe:
        """The recipe with a handful of prompts, short answers and two steps, all of it in the room."""
        recipe = self.recipe
        data, train = recipe.data, recipe.train

        def few(section: PromptSet, most: int) -> PromptSet:
            return section.model_copy(update={"count": min(section.count or most, most)})

        data = data.model_copy(
            update={
                "train": few(data.train, PROMPTS["train"]),
                "validation": few(data.validation, PROMPTS["validation"]),
                "heldout": {name: few(section, HELDOUT) for name, section in data.heldout.items()},
                "max_new_tokens": min(data.max_new_tokens, NEW_TOKENS),
            }
        )
        train = train.model_copy(
            update={
                "steps": STEPS,
                "warmup_steps": 0,
                "decay": "constant",
                "accumulate": 1,
                "log_every": 1,
                "validate_every": STEPS,
                "checkpoint_every": STEPS,
                "patience": None,
                "max_hours": None,
            }
        )
        track = recipe.track.model_copy(update={"log_with": [], "entity": None})
        return recipe.model_copy(
            update={"output": str(self.room), "data": data, "train": train, "track": track}
        )

    @property
    def run(self) -> Run:
        """A run of the small recipe; it locks and records nothing."""
        source = self.loaded.places.source
        return Run(self.small, source, (), ("peagle", "doctor", source), self.facts)
