"""The prompts of every set of a run, proven to share no text."""

from __future__ import annotations

import platform
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from data_prep.prompts import humaneval, jsonl, stdlib
from data_prep.prompts.base import Prompt, split_of, spread
from peagle_train.errors import PeagleError
from peagle_train.files import sha256_of
from peagle_train.recipe.schema import DataSection, PromptSet

# Benchmarks are reported on and never trained on: they have no splits.
_BENCHMARKS = frozenset({"humaneval"})
_NAMED: dict[str, Callable[[], list[Prompt]]] = {"stdlib": stdlib.load, "humaneval": humaneval.load}


@dataclass
class Collected:
    """Prompts by set, in the order train, validation, held-out sets."""

    sets: dict[str, list[Prompt]] = field(default_factory=dict)
    repeats: dict[str, int] = field(
        default_factory=dict
    )  # rows left out because their set has the text already


def load(section: PromptSet, name: str = "set") -> tuple[list[Prompt], int]:
    """Prompts of one set and the number of repeated rows left out. `name` is used in messages.

    Raises PeagleError: unknown source, bad row, an empty split, or fewer prompts than `count`.
    """
    prompts, repeats = _unique(_NAMED.get(section.source, lambda: jsonl.load(Path(section.source)))())
    if section.split != "all":
        if section.source in _BENCHMARKS:
            raise PeagleError(
                f"data.{name}: `{section.source}` is a benchmark and has no split {section.split!r}; "
                f"use split: all, under data.heldout"
            )
        prompts = [prompt for prompt in prompts if split_of(prompt.group) == section.split]
    if len(prompts) < (section.count or 1):
        raise PeagleError(
            f"data.{name}: source {section.source!r}, split {section.split!r} has {len(prompts)} different "
            f"prompts; {section.count or 'at least 1'} asked for: lower `count` or choose another split"
        )
    return spread(prompts, section.count), repeats


def collect(data: DataSection) -> Collected:
    """Prompts of all sets. Raises PeagleError if a text is in two sets, naming both."""
    _refuse_training_on_benchmarks(data)
    sections = {"train": data.train, "validation": data.validation, **data.heldout}
    collected = Collected()
    owner: dict[str, tuple[str, str]] = {}
    for name, section in sections.items():
        key = name if name in ("train", "validation") else f"heldout.{name}"
        prompts, collected.repeats[name] = load(section, key)
        for prompt in prompts:
            if prompt.text in owner:
                other, identity = owner[prompt.text]
                raise PeagleError(
                    f"data.{other} and data.{key} share a prompt: {identity} and {prompt.id} have the same "
                    f"text ({prompt.text[:60]!r}); sets must be disjoint: use different splits or files"
                )
        owner.update({prompt.text: (key, prompt.id) for prompt in prompts})
        collected.sets[name] = prompts
    return collected


def sources_fingerprint(data: DataSection) -> dict[str, str]:
    """What prompts depend on besides the recipe, by source: the Python version, or a file's checksum."""
    found = {}
    for section in (data.train, data.validation, *data.heldout.values()):
        if section.source == "stdlib":
            found["stdlib"] = f"Python {platform.python_version()}"
        elif section.source == "humaneval":
            found["humaneval"] = sha256_of(humaneval.data_file())
        elif Path(section.source).is_file():
            found[section.source] = sha256_of(Path(section.source))
        else:
            jsonl.load(Path(section.source))  # raises: no such file
    return found


def _refuse_training_on_benchmarks(data: DataSection) -> None:
    for name, section in (("train", data.train), ("validation", data.validation)):
        if section.source in _BENCHMARKS:
            raise PeagleError(
                f"data.{name}: `{section.source}` is a benchmark to report on; a head trained or chosen on "
                f"it proves nothing: put it under data.heldout"
            )


def _unique(prompts: list[Prompt]) -> tuple[list[Prompt], int]:
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.text, prompt)
    return list(first.values()), len(prompts) - len(first)
