"""Verbs that explain: what a recipe may say, and where prompts may come from."""

from __future__ import annotations

from typing import Annotated

import typer
from rich.console import Console

from peagle_train.cli.app import (
    Overrides,
    app,
    complain,
)


@app.command(
    short_help="list the data sets with names",
    help="List what `source` of a prompt set may say: data sets by name, and what each is good for.\n\n"
    "\b\nReads:    nothing\nWrites:   nothing\nExample:  peagle sources\n"
    "Then:     data.train: {source: ultrachat, split: train, count: 10000} in a recipe",
)
def sources() -> None:
    from peagle_train.pipeline import resolve

    resolve("data_prep.prompts.presets:print_table")(Console())


@app.command(
    short_help="explain every key; or check a recipe",
    help="Explain every key of a recipe with type, default and meaning; or check the recipe given.\n\n"
    "\b\nReads:    RECIPE, and its target's config\n"
    "Writes:   nothing\n"
    "Example:  peagle recipe > recipes/mine.yaml\n"
    "          peagle recipe smollm2 train.steps=200\n"
    "Then:     peagle run RECIPE",
)
def recipe(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="a YAML file, or NAME of recipes/NAME.yaml")
    ] = None,
    overrides: Overrides = None,
) -> None:
    if recipe is None:
        from peagle_train.recipe.fields import documentation

        typer.echo(documentation(), nl=False)
        return
    from peagle_train.recipe import check_against_target, read_recipe
    from peagle_train.recipe.yaml_text import dump

    loaded = read_recipe(recipe, overrides or ())
    from peagle_train.target.known import describe_or_known

    source = loaded.places.source
    facts, note = describe_or_known(loaded.recipe.target)
    check_against_target(loaded.recipe, facts, source, loaded.places)
    typer.echo(dump(loaded.recipe.model_dump(mode="json")), nl=False)
    if note is not None:
        complain(f"note: {note}")
    complain(f"{source}: no fault found; next: peagle run {source}")
