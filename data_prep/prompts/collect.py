"""The prompts of every set of a run, and the proof that sets share no text."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable
from dataclasses import dataclass
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
class Candidates:
    """Prompts of one set in the order in which they are taken, and how many are wanted."""

    prompts: list[Prompt]
    count: int | None  # None: all
    repeats: int  # rows left out because their set has the text already


def load(section: PromptSet, name: str = "set") -> Candidates:
    """All prompts of one set, dealt over its groups. `name` is used in messages.

    Not cut to `count` yet: some may turn out too long for the target's tokenizer.
    Raises PeagleError: unknown source, bad row, an empty split, or fewer prompts than `count`.
    """
    source = section.parts[0].source
    prompts, repeats = _unique(_NAMED.get(source, lambda: jsonl.load(Path(source)))())
    if section.split != "all":
        if source in _BENCHMARKS:
            raise PeagleError(
                f"data.{name}: `{source}` is a benchmark and has no split {section.split!r}; "
                f"use split: all, under data.heldout"
            )
        prompts = [prompt for prompt in prompts if split_of(prompt.group) == section.split]
    if len(prompts) < (section.count or 1):
        raise PeagleError(
            f"data.{name}: source {source!r}, split {section.split!r} has {len(prompts)} different "
            f"prompts; {section.count or 'at least 1'} asked for: lower `count` or choose another split"
        )
    return Candidates(spread(prompts), section.count, repeats)


def collect(data: DataSection) -> dict[str, Candidates]:
    """Candidates of every set, in the order train, validation, held-out sets."""
    _refuse_training_on_benchmarks(data)
    sections = {"train": data.train, "validation": data.validation, **data.heldout}
    return {name: load(section, set_key(name)) for name, section in sections.items()}


def set_key(name: str) -> str:
    """Where a set stands in the recipe, below `data`."""
    return name if name in ("train", "validation") else f"heldout.{name}"


def prove_disjoint(chosen: Iterable[tuple[str, str, str]]) -> None:
    """Raises PeagleError, naming both, if a text is in two sets. chosen: (set, id, text) of every prompt."""
    owner: dict[str, tuple[str, str]] = {}
    for name, identity, text in chosen:
        other, first = owner.setdefault(text, (name, identity))
        if other != name:
            raise PeagleError(
                f"data.{set_key(other)} and data.{set_key(name)} share a prompt: {first} and {identity} have "
                f"the same text ({text[:60]!r}); sets must be disjoint: use different splits or files"
            )


def sources_fingerprint(data: DataSection) -> dict[str, str]:
    """What prompts depend on besides the recipe, by source: the Python version, or a file's checksum."""
    found = {}
    for section in (data.train, data.validation, *data.heldout.values()):
        source = section.parts[0].source
        if source == "stdlib":
            found["stdlib"] = f"Python {platform.python_version()}"
        elif source == "humaneval":
            found["humaneval"] = sha256_of(humaneval.data_file())
        elif Path(source).is_file():
            found[source] = sha256_of(Path(source))
        else:
            jsonl.load(Path(source))  # raises: no such file
    return found


def _refuse_training_on_benchmarks(data: DataSection) -> None:
    for name, section in (("train", data.train), ("validation", data.validation)):
        source = section.parts[0].source
        if source in _BENCHMARKS:
            raise PeagleError(
                f"data.{name}: `{source}` is a benchmark to report on; a head trained or chosen on "
                f"it proves nothing: put it under data.heldout"
            )


def _unique(prompts: list[Prompt]) -> tuple[list[Prompt], int]:
    first: dict[str, Prompt] = {}
    for prompt in prompts:
        first.setdefault(prompt.text, prompt)
    return list(first.values()), len(prompts) - len(first)
