r"""ChatML with the marks that Qwen added: thoughts and calls.

    <|im_start|>assistant\n                     the generation prompt ends here, or behind <think>
    <think>\nthoughts\n</think>\n\nanswer
    <tool_call>\n{"name": "sum", "arguments": {"a": 2}}\n</tool_call>
    <|im_end|>

Qwen 3 Coder writes a call otherwise:

    <tool_call>\n<function=sum>\n<parameter=a>\n2\n</parameter>\n</function>\n</tool_call>

As history the template drops the thoughts of earlier turns. Newlines that the format puts around thoughts
belong to neither part.
"""

from __future__ import annotations

import re
from typing import Any

from data_prep.formats.base import ChatFormat, Said, call_of

_ENDS = ("<|im_end|>", "<|endoftext|>")
_FUNCTION = re.compile(r"<function=([^>\n]+)>(.*?)</function>", re.DOTALL)
_PARAMETER = re.compile(r"<parameter=([^>\n]+)>\n?(.*?)\n?</parameter>", re.DOTALL)


class ChatML(ChatFormat):
    name = "chatml"
    recognised_by = ("<|im_start|>", "<|im_end|>")
    opens = ("<|im_start|>",)
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>", *_ENDS)

    def _read(self, pieces: list[tuple[str, str]], tools: bool) -> Said:
        content, fault = "", ""
        reasoning: str | None = None
        calls: list[dict[str, Any]] = []
        pieces = [("", pieces[0][1].removeprefix("assistant\n")), *pieces[1:]]
        marks = [mark for mark, _ in pieces]
        for place, (mark, text) in enumerate(pieces):
            following = marks[place + 1] if place + 1 < len(marks) else ""
            if mark == "<think>":
                if following != "</think>":
                    fault = fault or "a thought that does not end"
                reasoning = (reasoning or "") + text.strip("\n")
            elif mark == "</think>":
                if "<think>" not in marks[:place]:  # the prompt or the target left its opening out
                    reasoning, content = content.strip("\n"), ""
                content += text.lstrip("\n")
            elif mark == "<tool_call>":
                call = _call(text)
                if call is None or following != "</tool_call>":
                    fault = fault or f"a call that cannot be read: {text!r:.60}"
                calls.append(call or {"name": "", "arguments": {}})
            elif mark == "</tool_call>" or mark in _ENDS:
                if text.strip():
                    fault = fault or f"text {text!r:.40} behind the end"
            else:
                content += text
        if tools and not calls and "<function=" in content:  # Qwen 3 Coder at times forgets the mark
            return Said(content, reasoning, (), fault or "a call without its mark")
        return Said(content.rstrip("\n") if calls else content, reasoning or None, tuple(calls), fault)


def _call(text: str) -> dict[str, Any] | None:
    function = _FUNCTION.fullmatch(text.strip())
    if function is None:
        return call_of(text)
    return {"name": function[1].strip(), "arguments": dict(_PARAMETER.findall(function[2]))}
