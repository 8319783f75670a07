"""Prompts that are on every machine: sums, a system turn, an earlier exchange, tools, a tool's result.

They stand in for sources that need a network. A number makes every prompt another one, so sets made from
numbers of their own share none.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from peagle_train.files import write_text

_ADD = {
    "type": "function",
    "function": {
        "name": "add",
        "description": "Adds.",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}},
            "required": ["a", "b"],
        },
    },
}


def write_prompts(path: Path, count: int, first: int) -> None:
    """Writes `count` rows of JSONL, made from the numbers `first`, `first + 1`, ..."""
    write_text(path, "".join(json.dumps(row(number)) + "\n" for number in range(first, first + count)))


def row(number: int) -> dict[str, Any]:
    """The prompt of a number: each form comes up in every five."""
    sum_of = f"What is {number} plus {number + 3}?"
    system = {"role": "system", "content": "Answer in one word."}
    earlier = [_user(f"Name {number} in words."), _assistant(f"The number {number}.")]
    call = {"name": "add", "arguments": json.dumps({"a": number, "b": number + 3})}
    called = [
        {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]},
        {"role": "tool", "name": "add", "content": str(2 * number + 3)},
    ]
    forms: list[dict[str, Any]] = [
        {"prompt": sum_of},
        {"messages": [system, _user(sum_of)]},
        {"messages": [*earlier, _user("And backwards?")]},
        {"messages": [_user(sum_of)], "tools": [_ADD]},
        {"messages": [_user(sum_of), *called, _user(f"Is that more than {number}?")], "tools": [_ADD]},
    ]
    return forms[number % len(forms)]


def _user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def _assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}
