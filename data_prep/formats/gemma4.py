r"""Gemma 4: thoughts on a channel, calls in a notation of their own.

    <|turn>model\n                                     the generation prompt ends here, or behind a thought
    <|channel>thought\nthoughts\n<channel|>answer<turn|>
    <|tool_call>call:sum{a:2,unit:<|"|>m<|"|>}<tool_call|><|tool_response>

With thinking off older templates end the prompt with an empty thought. Behind the result of a call the same
turn goes on. As history the template drops the thoughts of earlier turns.
"""

from __future__ import annotations

import json
import re
from typing import Any

from data_prep.formats.base import ChatFormat, Said, json_object

_THOUGHT = "thought\n"
_CALL = re.compile(r"call:([^{\s]+)(\{.*\})\s*", re.DOTALL)
# Text between its quotes, or the bare name of a key; what stands between the quotes is never looked into.
_WORD = re.compile(r'<\|"\|>(.*?)<\|"\|>|([A-Za-z_][\w.$-]*)(?=\s*:)', re.DOTALL)


class Gemma4(ChatFormat):
    name = "gemma4"
    recognised_by = ("<|turn>", "<turn|>")
    opens = ("<|turn>", "<tool_response|>")
    marks = (
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        "<|tool_response>",
        "<turn|>",
        "<eos>",
    )

    def _read(self, pieces: list[tuple[str, str]], tools: bool) -> Said:
        content, fault = pieces[0][1].removeprefix("model\n"), ""
        thoughts: list[str] = []
        calls: list[dict[str, Any]] = []
        marks = [mark for mark, _ in pieces]
        for (mark, text), following in zip(pieces[1:], [*marks[2:], ""], strict=True):
            if mark == "<|channel>":
                if following != "<channel|>" or not f"{text}\n".startswith(_THOUGHT):
                    fault = fault or f"a channel that cannot be read: {text!r:.60}"
                thoughts.append(text.removeprefix(_THOUGHT).strip("\n"))
            elif mark == "<|tool_call>":
                call = _call(text)
                if call is None or following != "<tool_call|>":
                    fault = fault or f"a call that cannot be read: {text!r:.60}"
                calls.append(call or {"name": "", "arguments": {}})
            elif mark == "<channel|>":
                content += text
            elif text.strip():
                fault = fault or f"text {text!r:.40} behind the end"
        return Said(content.strip(), "\n".join(filter(None, thoughts)) or None, tuple(calls), fault)


def _call(text: str) -> dict[str, Any] | None:
    whole = _CALL.fullmatch(text)
    if whole is None:
        return None
    arguments = json_object(_WORD.sub(_quoted, whole[2]))
    return None if arguments is None else {"name": whole[1], "arguments": arguments}


def _quoted(word: re.Match[str]) -> str:
    return json.dumps(word[2] if word[1] is None else word[1])
