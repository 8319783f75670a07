"""What the schema says about a key, in words: for error messages and for `peagle recipe`."""

from __future__ import annotations

import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Any, Literal

import annotated_types
from pydantic import BaseModel
from pydantic.fields import FieldInfo

from peagle_train.recipe.schema import Recipe
from peagle_train.recipe.yaml_text import Path, dump


@dataclass(frozen=True)
class Slot:
    """One place of the recipe: what may stand there.

    Attributes:
        annotation: the type, `Annotated` or not.
        limits: bounds that stand beside the type in a field.
        field: the field itself; None for an item of a list and an entry of a mapping.
    """

    annotation: Any
    limits: tuple[Any, ...] = ()
    field: FieldInfo | None = None

    @property
    def section(self) -> type[BaseModel] | None:
        """The section's class if a section stands here."""
        plain, _ = _unwrap(self.annotation, ())
        return plain if isinstance(plain, type) and issubclass(plain, BaseModel) else None

    @property
    def expected(self) -> str:
        """In words, e.g. `a whole number, at least 1`."""
        return _describe(self.annotation, self.limits)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The words that may stand here, if only some may."""
        plain, _ = _unwrap(self.annotation, ())
        if plain is bool:
            return ("true", "false")
        return typing.get_args(plain) if typing.get_origin(plain) is Literal else ()


def slot_at(path: Path) -> Slot | None:
    """The slot at `path`; None if the schema knows no such path."""
    slot = Slot(Recipe)
    for part in path:
        below = _step(slot, part)
        if below is None:
            return None
        slot = below
    return slot


def known_part(path: Path) -> Path:
    """The longest beginning of `path` that the schema knows.

    What follows are type names that pydantic adds for the members of a union.
    """
    for length in range(len(path), -1, -1):
        if slot_at(path[:length]) is not None:
            return path[:length]
    return ()


def keys_of(path: Path) -> list[str]:
    """The keys that a section may hold; none if no section stands there."""
    slot = slot_at(path)
    return list(slot.section.model_fields) if slot and slot.section else []


def has_free_names(path: Path) -> bool:
    """Whether the keys below `path` are names of the user's choice."""
    slot = slot_at(path)
    return slot is not None and typing.get_origin(_unwrap(slot.annotation, ())[0]) is dict


def all_keys() -> list[str]:
    """Every dotted key of the recipe; `*` stands for a name of the user's choice."""
    return [key for key, _ in _walk(Recipe, "")]


def documentation() -> str:
    """The whole schema as a commented YAML file: type, default and meaning of every key."""
    lines = [
        f"# {_summary(Recipe)}",
        "# Each key with its default; REQUIRED ones are empty. NAME is yours to choose.",
        "",
    ]
    lines += _document(Recipe, 0)
    return "\n".join(lines) + "\n"


def _document(section: type[BaseModel], depth: int) -> Iterator[str]:
    indent = "  " * depth
    for name, field in section.model_fields.items():
        slot = Slot(field.annotation, tuple(field.metadata), field)
        below = slot.section or _entry_section(field.annotation)
        if below is not None:
            yield ""
            required = " (REQUIRED)" if field.is_required() else ""
            yield f"{indent}# {field.description or _summary(below)}{required}"
            yield f"{indent}{name}:"
            inner = depth + 1
            if below is not slot.section:
                yield f"{'  ' * inner}NAME:"
                inner += 1
            yield from _document(below, inner)
        else:
            yield f"{indent}# {field.description}"
            value = "" if field.is_required() else f" {_default(field)}"
            yield f"{indent}{name}:{value}  # {'REQUIRED: ' if field.is_required() else ''}{slot.expected}"


def _default(field: FieldInfo) -> str:
    default = field.get_default(call_default_factory=True)
    default = list(default) if isinstance(default, tuple) else default
    text = dump([default]).strip().removeprefix("- ")
    return text if not isinstance(default, list) else "[" + ", ".join(str(item) for item in default) + "]"


def _summary(section: type[BaseModel]) -> str:
    return (section.__doc__ or "").strip().splitlines()[0].rstrip(".")


def _walk(section: type[BaseModel], prefix: str) -> Iterator[tuple[str, FieldInfo]]:
    for name, field in section.model_fields.items():
        key = prefix + name
        yield key, field
        if below := Slot(field.annotation).section:
            yield from _walk(below, key + ".")
        elif entry := _entry_section(field.annotation):
            yield from _walk(entry, key + ".*.")


def _entry_section(annotation: Any) -> type[BaseModel] | None:
    """The section that stands under each name of a mapping with free names, if sections stand there."""
    plain, _ = _unwrap(annotation, ())
    return Slot(typing.get_args(plain)[1]).section if typing.get_origin(plain) is dict else None


def _step(slot: Slot, part: str | int) -> Slot | None:
    if slot.section is not None:
        field = slot.section.model_fields.get(part) if isinstance(part, str) else None
        return Slot(field.annotation, tuple(field.metadata), field) if field else None
    plain, _ = _unwrap(slot.annotation, ())
    kind, arguments = typing.get_origin(plain), typing.get_args(plain)
    if kind is dict and isinstance(part, str):
        return Slot(arguments[1])
    if kind is list and isinstance(part, int):
        return Slot(arguments[0])
    if kind is tuple and isinstance(part, int) and part < len(arguments):
        return Slot(arguments[part])
    return None


def _unwrap(annotation: Any, limits: tuple[Any, ...]) -> tuple[Any, tuple[Any, ...]]:
    """Takes `Annotated` and `| None` away, and gathers the bounds."""
    while typing.get_origin(annotation) is Annotated:
        annotation, *extra = typing.get_args(annotation)
        for item in extra:
            limits += tuple(item.metadata) if isinstance(item, FieldInfo) else (item,)
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        options = [option for option in typing.get_args(annotation) if option is not type(None)]
        if len(options) == 1:
            return _unwrap(options[0], limits)
    return annotation, limits


def _describe(annotation: Any, limits: tuple[Any, ...]) -> str:
    optional = type(None) in typing.get_args(annotation)
    plain, limits = _unwrap(annotation, limits)
    kind, arguments = typing.get_origin(plain), typing.get_args(plain)
    if kind in (typing.Union, types.UnionType):
        text = ", or ".join(_describe(option, ()) for option in arguments if option is not type(None))
    elif kind is Literal:
        text = f"one of {', '.join(str(choice) for choice in arguments)}"
    elif kind is list:
        text = f"a list ({_describe(arguments[0], ())})"
    elif kind is tuple:
        text = f"a list of {len(arguments)} ({_describe(arguments[0], ())})"
    elif kind is dict:
        entry = "" if _entry_section(plain) else f" ({_describe(arguments[1], ())})"
        text = f"a section with a name for each entry{entry}"
    elif isinstance(plain, type) and issubclass(plain, BaseModel):
        text = f"a section with the keys {', '.join(plain.model_fields)}"
    else:
        text = _WORDS[plain]
    text += "".join(f", {bound}" for bound in _bounds(limits, kind))
    return f"{text}, or left out" if optional else text


def _bounds(limits: tuple[Any, ...], kind: Any) -> Iterator[str]:
    for limit in limits:
        if isinstance(limit, annotated_types.Ge):
            yield f"at least {limit.ge}"
        elif isinstance(limit, annotated_types.Gt):
            yield f"greater than {limit.gt}"
        elif isinstance(limit, annotated_types.Le):
            yield f"at most {limit.le}"
        elif isinstance(limit, annotated_types.Lt):
            yield f"less than {limit.lt}"
        elif isinstance(limit, annotated_types.MinLen):
            yield "not empty"
        elif getattr(limit, "pattern", None):
            yield "letters, digits, '.', '_', '-' only, the first no sign"


_WORDS = {int: "a whole number", float: "a number", str: "text", bool: "true or false"}
