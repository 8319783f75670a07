"""One prompt, and the two ways in which prompts are divided: into splits, and down to a count."""

from __future__ import annotations

import hashlib
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

Split = Literal["train", "validation", "heldout"]

# Shares of 256, by the first byte of the group's hash.
_VALIDATION = 20
_HELDOUT = 44


@dataclass(frozen=True)
class Message:
    """One turn of a conversation.

    reasoning: thoughts of an assistant turn. tool_calls: of an assistant turn, each {"name", "arguments"}
    with the arguments as a mapping. name: of the tool that a tool turn answers for.
    """

    role: Literal["system", "user", "assistant", "tool"]
    content: str
    reasoning: str | None = None
    tool_calls: tuple[dict[str, Any], ...] = ()
    name: str | None = None


@dataclass(frozen=True)
class Answered:
    """A row that comes with its tokens: what the target generated elsewhere."""

    token_ids: tuple[int, ...]
    spans: tuple[tuple[int, int], ...]  # [start, end) of every generated turn


@dataclass(frozen=True)
class Prompt:
    """A conversation that ends in a user or tool turn. Prompts of one `group` always share a split.

    tools: what the target may call, as JSON schemas of functions. answered: the tokens of a row that needs no
    answer any more; it has no messages.
    """

    id: str
    messages: tuple[Message, ...]
    group: str
    tools: tuple[dict[str, Any], ...] = ()
    answered: Answered | None = None

    @property
    def text(self) -> str:
        """All turns as one text, for people and for telling prompts apart."""
        return "\n\n".join(message.content for message in self.messages)


def digest(text: str) -> int:
    """A number that depends on the text alone: the same in every process, on every machine."""
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "big")


def split_of(group: str) -> Split:
    """The split of a group, by its hash: 192/256 train, 20/256 validation, 44/256 held out."""
    bucket = hashlib.sha256(f"group:{group}".encode()).digest()[0]
    if bucket < _VALIDATION:
        return "validation"
    return "heldout" if bucket < _VALIDATION + _HELDOUT else "train"


def spread(prompts: Sequence[Prompt]) -> list[Prompt]:
    """The prompts dealt round after round from every group, in hash order.

    So the first 100 of a source with 30 groups touch all 30, and a smaller count is a prefix of a larger.
    """
    by_group: dict[str, list[Prompt]] = defaultdict(list)
    for prompt in sorted(prompts, key=lambda prompt: digest(prompt.id)):
        by_group[prompt.group].append(prompt)
    dealt = [
        (turn, digest(group), prompt)
        for group, members in by_group.items()
        for turn, prompt in enumerate(members)
    ]
    dealt.sort(key=lambda entry: entry[:2])
    return [prompt for _, _, prompt in dealt]
