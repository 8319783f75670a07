"""Prompts from a JSONL file of one's own.

Each line is an object with either

    {"prompt": "text of the user's turn"}
    {"messages": [{"role": "system" | "user" | "assistant", "content": "..."}, ..., {"role": "user", ...}]}

and optionally `id` (text or number). Other keys are ignored. Assistant turns that stand in the row
are context only: the target did not generate them, so they are never supervised.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from data_prep.prompts.base import Message, Prompt
from peagle_train.errors import PeagleError


def load(path: Path) -> list[Prompt]:
    """All prompts of the file, repeats included. Raises PeagleError naming file and line of a bad row."""
    if not path.is_file():
        raise PeagleError(
            f"prompt source {str(path)!r}: no such file; expected `stdlib`, `humaneval` or the path of a "
            f"JSONL file (a relative path starts at the folder the command runs in)"
        )
    prompts = []
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except UnicodeDecodeError as error:
        raise PeagleError(f"{path}: not UTF-8 text ({error}); save it as UTF-8") from error
    for number, line in enumerate(lines, start=1):
        if line.strip():
            prompts.append(_prompt(line, path, number))
    if not prompts:
        raise PeagleError(f"{path}: holds no rows; expected one JSON object a line")
    return prompts


def _prompt(line: str, path: Path, number: int) -> Prompt:
    where = f"{path}:{number}"
    try:
        row = json.loads(line)
    except ValueError as error:
        raise PeagleError(f"{where}: not JSON ({error}); expected one object a line") from error
    if not isinstance(row, dict):
        raise PeagleError(f"{where}: found {type(row).__name__}, expected an object")
    if ("prompt" in row) == ("messages" in row):
        found = "both" if "prompt" in row else f"keys {sorted(row)}"
        raise PeagleError(f"{where}: found {found}; expected either `prompt` or `messages`")
    turns = [{"role": "user", "content": row["prompt"]}] if "prompt" in row else row["messages"]
    messages = _messages(turns, where)
    name = row.get("id", number)
    if not isinstance(name, str | int):
        raise PeagleError(f"{where}: `id` is {name!r}; expected text or a number")
    identity = f"{path.stem}:{name}"
    return Prompt(identity, messages, group="\n\n".join(message.content for message in messages))


def _messages(turns: Any, where: str) -> tuple[Message, ...]:
    if not isinstance(turns, list) or not turns:
        raise PeagleError(f"{where}: `messages` must be a list of turns that is not empty, found {turns!r}")
    messages = []
    for place, turn in enumerate(turns):
        role = turn.get("role") if isinstance(turn, dict) else None
        content = turn.get("content") if isinstance(turn, dict) else None
        if role not in ("system", "user", "assistant") or (role == "system" and place > 0):
            raise PeagleError(
                f"{where}: turn {place} has role {role!r}; expected system (first turn only), user or "
                f"assistant"
            )
        if not isinstance(content, str) or not content.strip():
            raise PeagleError(
                f"{where}: turn {place} has content {content!r}; expected text that is not empty"
            )
        messages.append(Message(role, content))
    if messages[-1].role != "user":
        raise PeagleError(
            f"{where}: the last turn is {messages[-1].role}; expected user, whom the target answers"
        )
    return tuple(messages)
