"""From a YAML file and overrides to a `Recipe`, or to every fault at once.

A user who mends one fault only to meet the next runs the command five times. So reading never stops at
the first: the YAML reader, the overrides, the schema and the rules between sections each list what they
find, each fault naming its place (file and line, or the command line) and its dotted key.
"""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from peagle_train.errors import PeagleError, RecipeError
from peagle_train.recipe import yaml_text
from peagle_train.recipe.fields import all_keys, keys_of, known_part, slot_at
from peagle_train.recipe.rules import Unreadable, View, broken_rules
from peagle_train.recipe.schema import Recipe
from peagle_train.recipe.yaml_text import dotted

COMMAND_LINE = "command line"


@dataclass
class Places:
    """Where each value of a recipe was written.

    Attributes:
        source: the recipe's path, as the user wrote it.
        lines: line of each key in the file.
        overridden: keys given on the command line, with the sections these made.
    """

    source: str
    lines: dict[yaml_text.Path, int] = field(default_factory=dict)
    overridden: set[yaml_text.Path] = field(default_factory=set)

    def of(self, key: yaml_text.Path | str) -> str:
        """`file:line` of a key or else of the section it belongs to, or `command line`."""
        path: yaml_text.Path = tuple(key.split(".")) if isinstance(key, str) else key
        for length in range(len(path), 0, -1):
            if path[:length] in self.overridden:
                return COMMAND_LINE
            if path[:length] in self.lines:
                return f"{self.source}:{self.lines[path[:length]]}"
        return self.source

    def override(self, path: yaml_text.Path) -> None:
        """Notes that the value at `path` comes from the command line, with all that lies below it."""
        self.lines = {key: line for key, line in self.lines.items() if key[: len(path)] != path}
        self.overridden.add(path)

    def rank(self, key: yaml_text.Path | str) -> tuple[int, int]:
        """Orders faults as a reader meets them: down the file, then the command line."""
        place = self.of(key)
        if place == COMMAND_LINE:
            return (1, 0)
        line = place.removeprefix(self.source).lstrip(":")
        return (0, int(line) if line else 0)


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe, and where its values were written (so that later checks can name lines too)."""

    recipe: Recipe
    places: Places


def find_recipe(path_or_name: Path | str) -> Path:
    """The file meant by `recipes/x.yaml` or by the bare name `x`; raises PeagleError if there is none."""
    path = Path(path_or_name)
    if path.is_file():
        return path
    named = Path("recipes") / f"{path_or_name}.yaml"
    if path.name == str(path_or_name) and named.is_file():
        return named
    known = sorted(Path("recipes").glob("*.yaml"))
    near = difflib.get_close_matches(path.stem, [file.stem for file in known], n=1)
    if near:
        cure = f"did you mean {Path('recipes') / near[0]}.yaml?"
    else:
        cure = f"recipes here: {', '.join(map(str, known)) or 'none (no folder `recipes` with *.yaml)'}"
    raise PeagleError(
        f"{path_or_name}: found no such recipe; expected the path of a YAML file, or NAME of "
        f"recipes/NAME.yaml; {cure}"
    )


def load_recipe(path: Path | str, overrides: Sequence[str] = ()) -> Recipe:
    """The recipe of a file with overrides `a.b=c` put over it. Raises RecipeError with all faults."""
    return read_recipe(path, overrides).recipe


def read_recipe(path: Path | str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """As `load_recipe`, with the places of the values.

    The value of an override is YAML (`head.aux_layers=[2,15,27]`, `push.to=` for nothing); of two
    overrides of one key the last counts, so that a user can add to a command that a script made.
    """
    file = find_recipe(path)
    source = str(file)
    try:
        text = file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RecipeError(
            source, [f"{source}: found bytes that are not UTF-8 ({error}); save it as UTF-8"]
        ) from error
    return read_text(text, source, overrides)


def read_text(text: str, source: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """As `read_recipe`, of a text. source: its name in messages."""
    document = yaml_text.parse(text)
    places = Places(source, document.lines)
    faults = [
        (_line_rank(line), f"{source}{f':{line}' if line else ''}: {f'{key}: ' if key else ''}{message}")
        for line, key, message in document.faults
    ]
    if document.faults and document.value is None:
        raise RecipeError(source, [message for _, message in faults])
    values = {} if document.value is None else document.value
    if not isinstance(values, dict):
        raise RecipeError(
            source,
            [f"{source}: found {found(values)}; expected a section with the keys {', '.join(keys_of(()))}"],
        )
    unreadable: list[yaml_text.Path] = [tuple(key.split(".")) for _, key, _ in document.faults if key]
    for override in overrides:
        fault = _apply(override, values, places)
        if fault:
            faults.append(((1, 0), f"{COMMAND_LINE}: {fault}"))
    recipe: Recipe | None = None
    try:
        recipe = Recipe.model_validate(values)
        refused: dict[yaml_text.Path, str] = {}
    except ValidationError as error:
        refused = _refused(error)
    for bad in unreadable:
        refused.pop(bad, None)  # already reported by the YAML reader; its value None means nothing
    view = View(values, [*refused, *unreadable], _default)
    rules = [(tuple(key.split(".")), message) for key, message in broken_rules(view)]
    for key, message in [*refused.items(), *rules]:
        faults.append((places.rank(key), f"{places.of(key)}: {dotted(key) or 'recipe'}: {message}"))
    if faults or recipe is None:
        raise RecipeError(source, [message for _, message in sorted(faults, key=lambda fault: fault[0])])
    return LoadedRecipe(recipe, places)


def found(value: Any) -> str:
    """A value as an error message shows it, with its kind where that is not obvious."""
    if value is None:
        return "nothing"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return f"the text {value!r}" if len(value) <= 60 else f"the text {value[:57]!r}..."
    if isinstance(value, dict):
        return "a section" if value else "an empty section"
    if isinstance(value, list):
        text = str(value)
        return f"the list {text}" if len(text) <= 60 else f"a list of {len(value)}"
    return f"the number {value}"


def suggestion(word: str, choices: Sequence[str], cutoff: float = 0.6) -> str | None:
    """The choice that `word` probably means."""
    lowered = {choice.lower(): choice for choice in choices}
    near = difflib.get_close_matches(word.lower(), list(lowered), n=1, cutoff=cutoff)
    return lowered[near[0]] if near else None


def _line_rank(line: int | None) -> tuple[int, int]:
    return (0, line or 0)


def _apply(override: str, values: dict[str, Any], places: Places) -> str | None:
    """Puts `a.b=c` into `values`; returns what is wrong with it, if anything."""
    key, equals, text = override.partition("=")
    path: yaml_text.Path = tuple(part.strip() for part in key.split("."))
    if not equals or not all(path):
        return f"found {override!r}; expected KEY=VALUE with a dotted key, e.g. train.steps=100"
    document = yaml_text.parse(text)
    if document.faults:
        return f"{dotted(path)}: found {text!r}; expected a YAML value ({document.faults[0][2]})"
    section = values
    for length, part in enumerate(path[:-1], start=1):
        below = section.get(str(part))
        if below is None:
            below = section[str(part)] = {}
            places.overridden.add(path[:length])
        if not isinstance(below, dict):
            return f"{dotted(path)}: {dotted(path[:length])} is {found(below)}; expected a section"
        section = below
    section[str(path[-1])] = document.value
    places.override(path)
    return None


def _default(path: tuple[str, ...]) -> Any:
    """The default at a path that the file leaves out; its sections' defaults are made of their fields'."""
    slot = slot_at(path)
    if slot is None or slot.field is None or slot.field.is_required():
        raise Unreadable(dotted(path))
    return slot.field.get_default(call_default_factory=True)


def _refused(error: ValidationError) -> dict[yaml_text.Path, str]:
    """Pydantic's findings in our words, one per key (a union reports once per member)."""
    refused: dict[yaml_text.Path, str] = {}
    for item in error.errors(include_url=False):
        path: yaml_text.Path = item["loc"]
        if not path:
            continue  # the rules between sections, which the loader asks itself
        if item["type"] == "extra_forbidden":
            refused[path] = _unknown_key(path)
            continue
        if path[-1] == "[key]":
            refused[path[:-1]] = (
                f"found the name {str(path[-2])!r}; expected letters, digits, '_' and '-', the first no sign"
            )
            continue
        path = known_part(path)
        slot = slot_at(path)
        expected = slot.expected if slot else ""
        if item["type"] == "missing":
            about = f": {slot.field.description}" if slot and slot.field and slot.field.description else ""
            refused[path] = f"missing; expected {expected}{about}"
        elif item["type"] == "value_error":
            refused[path] = str(item["ctx"]["error"])
        elif path not in refused:
            refused[path] = f"found {found(item['input'])}; expected {expected}{_cure(item['input'], path)}"
    return refused


def _cure(value: Any, path: yaml_text.Path) -> str:
    """What to write instead, where that can be told."""
    slot = slot_at(path)
    if slot is None:
        return ""
    if slot.choices:
        word = {"yes": "true", "on": "true", "no": "false", "off": "false"}.get(
            str(value).lower(), str(value)
        )
        near = suggestion(word, [str(choice) for choice in slot.choices], cutoff=0.5)
        return f"; did you mean {near}?" if near else ""
    wants_text = slot.expected.startswith("text")
    if wants_text and isinstance(value, (int, float)):
        return "; put it in quotes (on a command line in both kinds: '\"...\"')"
    if isinstance(value, str) and not wants_text and not isinstance(yaml_text.parse(value).value, str):
        return "; leave the quotes out"
    return ""


def _unknown_key(path: yaml_text.Path) -> str:
    siblings = keys_of(path[:-1])
    word = str(path[-1])
    near = suggestion(word, siblings)
    if near:
        return f"unknown key; did you mean {dotted((*path[:-1], near))}?"
    # The right word in the wrong section: `learning_rate` at the top, `train.rate` for `train.cod.rate`.
    by_word: dict[str, str] = {}
    for key in all_keys():
        by_word.setdefault(key.rpartition(".")[2], key)
    elsewhere = suggestion(word, list(by_word), cutoff=0.8)
    if elsewhere:
        return f"unknown key; did you mean {by_word[elsewhere]}?"
    return f"unknown key; expected one of {', '.join(siblings)}"
