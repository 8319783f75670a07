"""Harmony, the format of gpt-oss: an assistant turn is several messages, each on a channel.

    <|start|>assistant                                          the generation prompt ends here
    <|channel|>analysis<|message|>thoughts<|end|>
    <|start|>assistant<|channel|>final<|message|>answer<|return|>

    or, in place of the last line, a call:
    <|start|>assistant<|channel|>commentary to=functions.NAME <|constrain|>json<|message|>{...}<|call|>

As history the template drops the thoughts, and `<|return|>` becomes `<|end|>`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from data_prep.formats.base import ChatFormat, Said, json_object

_ENDS = ("<|end|>", "<|return|>", "<|call|>")
_TO = re.compile(r"\bto=(\S+)")


@dataclass
class _Part:
    """One message of the turn: what stands before `<|message|>`, and what after."""

    head: str = ""
    channel: str = ""
    body: str | None = None

    @property
    def recipient(self) -> str | None:
        """Whom a call is for; it stands behind the role or behind the channel."""
        found = _TO.search(f"{self.head} {self.channel}")
        return found[1].removeprefix("functions.") if found else None


class Harmony(ChatFormat):
    name = "harmony"
    recognised_by = ("<|start|>", "<|channel|>", "<|message|>")
    opens = ("<|start|>",)
    marks = ("<|start|>", "<|channel|>", "<|constrain|>", "<|message|>", *_ENDS)
    most_calls = 1

    def _read(self, pieces: list[tuple[str, str]], tools: bool) -> Said:
        parts: list[_Part] = []
        fault = ""
        for mark, text in pieces:
            if mark in ("", "<|start|>"):
                parts.append(_Part(head=text))
            elif mark == "<|channel|>":
                parts[-1].channel = text
            elif mark == "<|message|>":
                parts[-1].body = text
            elif mark in _ENDS and text:
                fault = f"text {text!r:.40} outside a message"
        said: dict[str, list[str]] = {"analysis": [], "final": [], "commentary": []}
        calls: list[dict[str, Any]] = []
        for part in parts:
            channel = part.channel.split(" ")[0].strip()
            if part.body is None or channel not in said or not part.head.startswith("assistant"):
                fault = fault or f"a message with head {part.head!r:.40} on channel {part.channel!r:.40}"
            elif part.recipient is None:
                said[channel].append(part.body)
            else:
                arguments = json_object(part.body)
                calls.append({"name": part.recipient, "arguments": arguments or {}})
                if arguments is None:
                    fault = fault or f"a call of {part.recipient} whose arguments are no JSON object"
        if not said["final"] and not calls:
            fault = fault or "neither a final message nor a call"
        # A commentary for nobody is shown to the user: what it is about to call, and why.
        content = "".join([*said["commentary"], *said["final"]])
        return Said(content, "".join(said["analysis"]) or None, tuple(calls), fault)
