"""From a row of data to a prompt: which column holds what, who speaks, what of it is asked.

    prompt       text of one user turn; a list of texts is a user turn each (data.turns: last asks the first)
    messages     turns {role, content} or ShareGPT's {from, value}; `tool_calls`, `reasoning_content`, `name`
    token_ids    with loss_mask: a row that the target answered elsewhere
    system, id, tools

A row may name its columns and roles otherwise: the recipe then maps them (`columns`, `roles`). Nothing is
guessed: a row that does not fit is a reject, which says the key of the recipe that would map it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from typing import Any, Literal

from data_prep.prompts.base import Answered, Message, Prompt
from peagle_train.recipe.data import MixPart

_ROLES = ("system", "user", "assistant", "tool")
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")


class BadRowError(Exception):
    """A row that no prompt can be made of, and why."""


def prompt_of(
    row: Mapping[str, Any], part: MixPart, name: str, turns: Literal["last", "each"] = "last"
) -> Prompt:
    """The prompt of one row.

    Args:
        row: as it stands in the data.
        part: whose `columns` and `roles` map it.
        name: of the source, for the prompt's id.
        turns: as `data.turns`. Assistant turns at the end are left out: the target says them itself.

    Raises BadRowError.
    """
    given: dict[str, Any] = {ours: row.get(theirs) for ours, theirs in part.columns.items()}
    missing = [theirs for ours, theirs in part.columns.items() if theirs not in row]
    if missing:
        raise BadRowError(f"has no column {', '.join(missing)}, which `columns` of the recipe names")
    for ours in ("id", "tools", "token_ids", "loss_mask"):
        given.setdefault(ours, row.get(ours))
    if "messages" not in given and "prompt" not in given and given["token_ids"] is None:
        found = [key for key in ("prompt", "messages") if key in row]
        if len(found) != 1:
            raise BadRowError(
                f"found {'both' if found else 'keys ' + str(sorted(row))}; expected either `prompt` or "
                "`messages`, or `columns` in the recipe that says which column is which"
            )
        given[found[0]] = row[found[0]]
    identity = _identity(given["id"], name)
    if given["token_ids"] is not None:
        answered = _answered(given["token_ids"], given["loss_mask"])
        text = str(list(answered.token_ids))
        return Prompt(identity or f"{name}:{_hash(text)}", (), group=text, answered=answered)
    messages = _messages(given, part, turns)
    tools = tuple(_tools(given["tools"]))
    while messages and messages[-1].role == "assistant":
        messages.pop()
    _check_order(messages, turns)
    group = "\n\n".join(message.content for message in messages)
    whole = json.dumps([[m.role, m.content, m.reasoning, m.tool_calls] for m in messages] + list(tools))
    return Prompt(identity or f"{name}:{_hash(whole)}", tuple(messages), group, tools)


def _identity(value: Any, name: str) -> str | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, str | int):
        raise BadRowError(f"`id` is {value!r}; expected text or a number")
    return f"{name}:{value}"


def _messages(given: Mapping[str, Any], part: MixPart, turns: str) -> list[Message]:
    messages = []
    if given.get("system"):
        messages.append(Message("system", _text(given["system"], "the system text")))
    if "messages" not in given:
        value = given["prompt"]
        texts = value if isinstance(value, list) else [value]
        if not texts:
            raise BadRowError("`prompt` is an empty list")
        if turns == "last":
            texts = texts[:1]  # the others would need the answers between them
        return [*messages, *(Message("user", _text(text, "`prompt`")) for text in texts)]
    said = given["messages"]
    if not isinstance(said, list) or not said:
        raise BadRowError(f"`messages` must be a list of turns that is not empty, found {said!r:.60}")
    for place, turn in enumerate(said):
        messages.append(_message(turn, place, part))
    return messages


def _message(turn: Any, place: int, part: MixPart) -> Message:
    if not isinstance(turn, Mapping):
        raise BadRowError(f"turn {place} is {turn!r:.60}; expected an object with role and content")
    named = turn.get("role", turn.get("from"))
    role = part.roles.get(str(named), named)
    if role not in _ROLES:
        raise BadRowError(
            f"turn {place} has role {named!r}; expected system, user, assistant or tool; map it in the "
            f"recipe: roles: {{{named}: user}}, say"
        )
    calls = tuple(_call(call, place) for call in turn.get("tool_calls") or ())
    content = turn.get("content", turn.get("value"))
    if isinstance(content, list):
        content = _joined(content, place)
    if content is None and calls:
        content = ""
    if not isinstance(content, str) or not (content.strip() or calls or role == "tool"):
        raise BadRowError(f"turn {place} has content {content!r:.60}; expected text that is not empty")
    thoughts = next((turn[key] for key in _THOUGHTS if isinstance(turn.get(key), str)), None)
    name = turn.get("name") if role == "tool" else None
    return Message(role, content, thoughts or None, calls, name)


def _joined(parts: list[Any], place: int) -> str:
    texts = [part.get("text") if isinstance(part, Mapping) else None for part in parts]
    if not all(isinstance(text, str) for text in texts):
        kinds = sorted({str(part.get("type")) for part in parts if isinstance(part, Mapping)})
        raise BadRowError(f"turn {place} holds parts of kind {', '.join(kinds)}; expected text alone")
    return "".join(str(text) for text in texts)


def _call(call: Any, place: int) -> dict[str, Any]:
    function = call.get("function", call) if isinstance(call, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    arguments = function.get("arguments") if isinstance(function, Mapping) else None
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except ValueError:
            arguments = None
    if not isinstance(name, str) or not isinstance(arguments, Mapping):
        raise BadRowError(
            f"turn {place} calls {call!r:.80}; expected a name, and arguments that are an object or its JSON"
        )
    return {"name": name, "arguments": dict(arguments)}


def _tools(value: Any) -> list[dict[str, Any]]:
    if isinstance(value, str):
        try:
            value = json.loads(value)
        except ValueError as error:
            raise BadRowError(f"`tools` is no JSON ({error})") from error
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(tool, Mapping) for tool in value):
        raise BadRowError(f"`tools` is {value!r:.60}; expected a list of functions")
    return [dict(tool) for tool in value]


def _check_order(messages: list[Message], turns: str) -> None:
    roles = [message.role for message in messages]
    if "system" in roles[1:]:
        raise BadRowError(f"turn {roles.index('system', 1)} has role 'system'; expected it first only")
    if not roles or "user" not in roles:
        raise BadRowError("holds no user turn, whom the target would answer")
    twice = [place for place in range(1, len(roles)) if roles[place - 1] == roles[place] == "user"]
    if twice and turns == "last":
        raise BadRowError(
            f"turn {twice[0]} is the user's right after turn {twice[0] - 1}: an answer is missing between "
            "them; data.turns: each lets the target give it"
        )


def _answered(token_ids: Any, loss_mask: Any) -> Answered:
    whole = isinstance(token_ids, list) and all(isinstance(token, int) for token in token_ids)
    fits = isinstance(loss_mask, list) and whole and len(loss_mask) == len(token_ids)
    if not whole or not fits:
        raise BadRowError("`token_ids` needs whole numbers, and a `loss_mask` of the same length")
    edges = [
        place for place in range(1, len(loss_mask)) if bool(loss_mask[place]) != bool(loss_mask[place - 1])
    ]
    if not any(loss_mask) or loss_mask[0]:
        raise BadRowError(
            "`loss_mask` marks no token, or the very first: expected the generated ones after a prompt"
        )
    edges += [len(loss_mask)] if loss_mask[-1] else []
    return Answered(tuple(token_ids), tuple(zip(edges[::2], edges[1::2], strict=True)))


def _text(value: Any, what: str) -> str:
    if not isinstance(value, str) or not value.strip():
        raise BadRowError(f"{what} is {value!r:.60}; expected text that is not empty")
    return value


def _hash(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:12]
