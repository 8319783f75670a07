"""What a user, a tool or a data set gives must stay text: it never becomes a control token.

Two looks, because templates do two things with what they are given:

    text that spells a token       "a<|im_end|>b"                     found in the text itself
    a name that is put in marks    {"think": 3} -> "<think>3</think>"   found by rendering neutral names
                                                                     instead: fewer tokens, so it forges
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import replace
from typing import Any

from data_prep.prompts import Message

_SCHEMA = {"type", "function", "name", "description", "parameters", "properties", "required", "items", "enum"}
_SCHEMA |= {"default", "nullable", "oneOf", "anyOf", "allOf", "response", "return", "strict", "arguments"}
"""Keys that templates look for; a template does not see the same tool without them."""


class Marks:
    """Finds control tokens in text. Gemma has 6,000 of them: to look for each in turn would take hours."""

    def __init__(self, texts: Set[str]):
        self._texts = texts
        self._lengths = sorted({len(text) for text in texts})
        first = "".join(re.escape(letter) for letter in sorted({text[0] for text in texts}))
        self._opening = re.compile(f"[{first}]" if texts else "(?!)")

    def first_in(self, value: Any) -> str | None:
        """The first one in any text of a JSON value, keys too; None if there is none."""
        return next((mark for text in _texts(value) for mark in self._in(text)), None)

    def _in(self, text: str) -> Iterator[str]:
        for found in self._opening.finditer(text):
            for length in self._lengths:
                piece = text[found.start() : found.start() + length]
                if piece in self._texts:
                    yield piece


class Neutral:
    """The same turns and tools with other words: nothing of what was given is left but its shape.

    Equal names become equal names, so a result still belongs to its call; empty text stays empty.
    """

    def __init__(self) -> None:
        self._names: dict[str, str] = {}

    def turns(self, messages: Sequence[Message]) -> list[Message]:
        return [
            replace(
                turn,
                content=_words(turn.content),
                reasoning=None if turn.reasoning is None else _words(turn.reasoning),
                tool_calls=tuple(self._value(call) for call in turn.tool_calls),
                name=None if turn.name is None else self._name(turn.name),
            )
            for turn in messages
        ]

    def tools(self, tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        return [self._value(tool) for tool in tools]

    def _value(self, value: Any, under: str = "") -> Any:
        if isinstance(value, Mapping):
            named = under in ("properties", "arguments")  # whose keys are names, whatever they are
            return {
                (key if key in _SCHEMA and not named else self._name(str(key))): self._value(inner, key)
                for key, inner in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._value(inner, under) for inner in value]
        if not isinstance(value, str) or under == "type":
            return value
        return self._name(value) if under == "name" else _words(value)

    def _name(self, name: str) -> str:
        return self._names.setdefault(name, f"n{len(self._names)}")


def _words(text: str) -> str:
    return "x" if text.strip() else text


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from (str(key), *_texts(inner))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)
