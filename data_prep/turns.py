"""Which turns of a conversation the target is asked, and in what way.

data.turns: last     all turns stand as they are, and one answer follows
data.turns: each     an answer follows every user turn, and takes the place of the recorded one

    system  user  assistant  user  assistant calls  tool  assistant  user
    ------------  asked      ---------------------------  asked      ----  asked
                  ^ left out                              ^ left out
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from data_prep.prompts import Message
from data_prep.prompts.base import digest
from peagle_train.recipe.data import Sampling

Turns = Literal["last", "each"]

_ASKABLE = ("user", "tool")


def asks_of(messages: Sequence[Message], turns: Turns) -> list[tuple[Message, ...]]:
    """What is put before the target, answer by answer: each part comes on top of all that was said before.

    A recorded call of a tool stands together with its results, which belong to it. Every other recorded
    assistant turn is the target's to say.
    """
    if turns == "last":
        return [tuple(messages)]
    asks: list[tuple[Message, ...]] = []
    added: list[Message] = []
    for message in messages:
        told = message.role == "assistant" and not message.tool_calls
        missing = message.role == "user" and added and added[-1].role in _ASKABLE
        if (told or missing) and added and added[-1].role in _ASKABLE:
            asks.append(tuple(added))
            added = []
        if not told:
            added.append(message)
    if added and added[-1].role in _ASKABLE:
        asks.append(tuple(added))
    return asks


@dataclass(frozen=True)
class Way:
    """How a prompt is asked. temperature 0: greedily. variables: for the chat template."""

    temperature: float = 0.0
    top_p: float = 1.0
    variables: dict[str, Any] = field(default_factory=dict)


def draw(sampling: Sequence[Sampling], set: str, content: str) -> Way:
    """The way in which a prompt is asked: by its content alone, each way with its weight.

    Temperatures are for training. What is measured (validation, held-out sets) is answered greedily, but
    with the drawn variables: a head serves every reasoning effort.
    """
    if not sampling:
        return Way()
    place = digest(f"way:{content}") / 2**64 * sum(way.weight for way in sampling)
    chosen = sampling[-1]
    for way in sampling:
        if place < way.weight:
            chosen = way
            break
        place -= way.weight
    if set != "train":
        return Way(variables=dict(chosen.template_variables))
    return Way(chosen.temperature, chosen.top_p, dict(chosen.template_variables))
