"""`peagle run RECIPE --twin`: the whole road of a recipe on a laptop, with a random twin of its target.

OUTPUT/NAME-twin/twin/target/       the twin
OUTPUT/NAME-twin/twin/prompts/      prompts in place of those that need a network
OUTPUT/NAME-twin/twin/recipe.yaml   the recipe that is run
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from peagle_train.errors import PeagleError
from peagle_train.files import write_text
from peagle_train.recipe import Recipe, load_recipe
from peagle_train.recipe.yaml_text import dump
from peagle_train.twin.make import original_of
from peagle_train.twin.mapping import Rehearsal, rehearsal_of
from peagle_train.twin.prompts import write_prompts

_CAPTION = (
    "All other keys are the recipe's. A random model's acceptance says nothing; that the road holds does."
)


def rehearse(recipe_path: str, overrides: Sequence[str], console: Console) -> Path:
    """Writes the twin, its prompts and its recipe, and prints what is otherwise; returns the recipe's path.

    Raises PeagleError: the recipe is faulty, or nothing is known of its target.
    """
    recipe = load_recipe(recipe_path, overrides)
    room = Path(recipe.output) / f"{recipe.name}-twin" / "twin"
    rehearsal = rehearsal_of(recipe, original_of(recipe.target), room)
    path = room / "recipe.yaml"
    twin_recipe = Recipe.model_validate(rehearsal.values)
    rehearsal.twin.write(room / "target")
    for file in rehearsal.prompts:
        write_prompts(file.path, file.rows, file.first)
    write_text(
        path,
        f"# A rehearsal of {recipe_path} with a random twin of its target.\n"
        + dump(twin_recipe.model_dump(mode="json")),
    )
    _print(rehearsal, recipe_path, console)
    return path


def write_twin(recipe_path: str, overrides: Sequence[str], folder: Path, console: Console) -> None:
    """`peagle twin`: the model alone, into a folder that is not there yet.

    Raises PeagleError if something else stands at `folder`.
    """
    recipe = load_recipe(recipe_path, overrides)
    twin = rehearsal_of(recipe, original_of(recipe.target), folder.parent).twin
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise PeagleError(f"{folder}: found something there; expected no such path or an empty folder")
    twin.write(folder)
    facts = replace(twin.facts, model=str(folder))
    console.print(
        f"{folder}: {facts.class_name} with random weights, {facts.num_layers} layers, hidden size "
        f"{facts.hidden_size}, {facts.vocab_size} tokens; aux layer ids 0 to {facts.num_layers}; mask token "
        f"{twin.shape.mask!r}",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _print(rehearsal: Rehearsal, recipe_path: str, console: Console) -> None:
    table = Table(title=f"A rehearsal of {recipe_path}", caption=_CAPTION)
    table.add_column("key", no_wrap=True)
    for heading in ("recipe", "rehearsal", "because"):
        table.add_column(heading, overflow="fold")
    for change, before in rehearsal.changes:
        table.add_row(change.key, _short(before), _short(change.value), change.why)
    console.print(table)


def _short(value: Any) -> str:
    text = (
        "-" if value is None else value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    )
    return text if len(text) <= 40 else f"{text[:37]}..."
