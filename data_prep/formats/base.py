"""What all chat formats share: marks in the tokens, and what was said between them.

Marks are control tokens, found by their ids. Text that merely spells one is text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from data_prep.prompts import Message


@dataclass(frozen=True)
class Said:
    """One assistant turn.

    content: what the user sees.
    reasoning: the thoughts before it; None where there are none.
    tool_calls: each {"name", "arguments"}.
    fault: why the turn cannot be read to its end; "" where it can.
    """

    content: str
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    fault: str = ""

    @property
    def message(self) -> Message:
        """The turn as history."""
        return Message("assistant", self.content, self.reasoning, self.tool_calls)


class ChatFormat(ABC):
    """How one family writes an assistant turn.

    Attributes:
        recognised_by: marks that tell the format from all others.
        opens: marks behind which an assistant turn, or what is left of it, begins.
        marks: all marks that part an assistant turn.
        most_calls: calls that the format's templates render in one turn; None: any number.
    """

    name: ClassVar[str]
    recognised_by: ClassVar[tuple[str, ...]]
    opens: ClassVar[tuple[str, ...]]
    marks: ClassVar[tuple[str, ...]]
    most_calls: ClassVar[int | None] = None

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        known = {token.content: id for id, token in tokenizer.added_tokens_decoder.items()}
        self._marks = {known[mark]: mark for mark in self.marks if mark in known}
        self._opens = {known[mark] for mark in self.opens if mark in known}

    def read(self, prompt: Sequence[int], answer: Sequence[int], *, tools: bool = False) -> Said:
        """What the target said.

        Args:
            prompt: what it was asked, up to the generation prompt, which may begin the turn for it (an
                empty thought, an open one).
            answer: what it generated, end token included.
            tools: whether it was offered any; some formats have no mark for a call.
        """
        begun = next((place for place in reversed(range(len(prompt))) if prompt[place] in self._opens), -1)
        return self._read(self._pieces([*prompt[begun + 1 :], *answer]), tools)

    @abstractmethod
    def _read(self, pieces: list[tuple[str, str]], tools: bool) -> Said:
        """pieces: each text with the mark before it; the first has none ("")."""

    def _pieces(self, token_ids: Sequence[int]) -> list[tuple[str, str]]:
        found: list[tuple[str, str]] = []
        mark, run = "", list[int]()
        for token in token_ids:
            if token in self._marks:
                found.append((mark, self._text(run)))
                mark, run = self._marks[token], []
            else:
                run.append(token)
        return [*found, (mark, self._text(run))]

    def _text(self, token_ids: list[int]) -> str:
        text: str = self._tokenizer.decode(
            token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False
        )
        return text


def call_of(text: str, arguments: str = "arguments") -> dict[str, Any] | None:
    """A call written as JSON {"name", arguments}; None if it is none."""
    value = json_object(text)
    if value is None or not isinstance(value.get("name"), str) or arguments not in value:
        return None
    given = value[arguments]
    if isinstance(given, str):
        given = json_object(given)
    return {"name": value["name"], "arguments": given} if isinstance(given, Mapping) else None


def json_object(text: str) -> dict[str, Any] | None:
    """The object that a text is in JSON; None if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None
