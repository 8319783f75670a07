"""`peagle init`: a first recipe for a model, from its config.

What the config does not tell is not guessed. Where no tokenizer is at hand, or its table is full, the mask
token is a line to fill in, and the recipe does not load until it is.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle_train.errors import PeagleError, RecipeError
from peagle_train.files import write_text
from peagle_train.planning.head import head_of
from peagle_train.planning.init_text import MaskToken, context_of, recipe_text
from peagle_train.planning.ranks import FOLDER, GPU_GB, rank_of, read_launch
from peagle_train.recipe import Recipe, check_against_target
from peagle_train.recipe.load import read_text
from peagle_train.recipe.schema import TargetSection
from peagle_train.target.facts import TargetFacts
from peagle_train.target.known import describe_or_known, known
from peagle_train.target.mask_token import resolve_mask_token

_FILLED = ("head.mask_token=0",)
"""Put over a text whose mask token is still to be named, so that the rest of it can be proven."""


@dataclass(frozen=True)
class Written:
    """Where a recipe was written, and what to say about it."""

    path: Path
    told: list[str]


def write_recipe(
    model: str, *, out: Path | None = None, name: str | None = None, revision: str | None = None
) -> Written:
    """Writes a commented recipe, proven to load once its mask token is named.

    Args:
        model: a folder, a Hub id, or package:NAME.
        out: the file; left out: recipes/NAME.yaml.
        name: of the recipe; left out: the last part of the model's, in small letters.
        revision: of the model on the Hub.

    Raises:
        PeagleError: a file is there already; the model is not found, or its class is not supported.
    """
    name = name or _name(model)
    path = out or Path("recipes") / f"{name}.yaml"
    if path.exists():
        raise PeagleError(
            f"{path}: found a file there, which is kept; expected none; give --out or --name, or move it away"
        )
    target = TargetSection(model=model, revision=revision)
    facts, note = describe_or_known(target)
    tokenizer = _tokenizer(target) if note is None else None
    mask = _mask_token(model, facts, tokenizer)
    recipe = _proven(recipe_text(name, target, facts, mask, tokenizer), facts, mask)
    launch = _launch(recipe, facts)
    text = recipe_text(name, target, facts, mask, tokenizer, launch)
    _proven(text, facts, mask)
    write_text(path, text)
    told = [f"note: {note}"] if note is not None else []
    told.append(f"{path}: for {facts.class_name}, {facts.num_layers} layers of {facts.hidden_size:,}")
    if mask.value is None:
        told.append(f"to fill in before it loads: head.mask_token: {mask.about}")
    return Written(path, told)


def _proven(text: str, facts: TargetFacts, mask: MaskToken) -> Recipe:
    """The text as a recipe. Raises PeagleError if this target makes one of its values impossible."""
    try:
        loaded = read_text(text, "the recipe", () if mask.value is not None else _FILLED)
        check_against_target(loaded.recipe, facts, "the recipe", loaded.places)
    except RecipeError as error:
        raise PeagleError(
            f"target {facts.model}: none of the defaults of `peagle init` fits it: {error.faults[0]}"
        ) from error
    return loaded.recipe


def _mask_token(model: str, facts: TargetFacts, tokenizer: Any) -> MaskToken:
    if tokenizer is None:
        entry = known(model)
        if entry is not None:
            return MaskToken(entry.mask_token, "docs/targets.md: of this vocabulary")
        return MaskToken(
            None, "FILL IN: `unused` if the embedding table has rows without a token, else a reserved token"
        )
    try:
        found = resolve_mask_token("unused", tokenizer, facts.vocab_size, None)
    except PeagleError as error:
        return MaskToken(None, f"FILL IN: {str(error).partition('. ')[2]}")
    return MaskToken("unused", f"the first row without a token, {found}")


def _tokenizer(target: TargetSection) -> Any:
    """The target's tokenizer, if it is at hand."""
    if target.model.startswith("package:"):
        return None
    from transformers import AutoTokenizer

    try:
        return AutoTokenizer.from_pretrained(target.model, revision=target.revision)
    except (OSError, ValueError):
        return None


def _launch(recipe: Recipe, facts: TargetFacts) -> Path | None:
    """The first launch file whose process fits a GPU of GPU_GB; None where there are none to choose from."""
    head = head_of(recipe, facts)
    for file in (FOLDER / "eight_gpus.yaml", FOLDER / "fsdp2.yaml"):
        if not file.is_file():
            continue
        launch, gpu = read_launch(file), int(GPU_GB * 1e9)
        if rank_of(recipe, head, facts.hidden_size, context_of(facts), launch, gpu).plan is not None:
            return file
    return None


def _name(model: str) -> str:
    last = model.rstrip("/").split("/")[-1].removeprefix("package:").lower()
    name = re.sub(r"[^a-z0-9._-]+", "-", last).strip("-._")
    if not name:
        raise PeagleError(f"{model}: no name for a recipe can be made of it; give --name")
    return name
