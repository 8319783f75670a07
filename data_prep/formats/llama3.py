r"""Llama 3: plain text behind a header; a call is JSON alone, or follows a mark of its own.

<|start_header_id|>assistant<|end_header_id|>\n\n          the generation prompt ends here
answer<|eot_id|>
{"name": "sum", "parameters": {"a": 2}}<|eot_id|>           a call, where tools were offered
<|python_tag|>{"name": "sum", "parameters": {"a": 2}}<|eom_id|>
"""

from __future__ import annotations

from data_prep.formats.base import ChatFormat, Said, call_of

_ENDS = ("<|eot_id|>", "<|eom_id|>", "<|end_of_text|>")


class Llama3(ChatFormat):
    name = "llama3"
    recognised_by = ("<|start_header_id|>", "<|end_header_id|>")
    opens = ("<|end_header_id|>",)
    marks = ("<|python_tag|>", *_ENDS)
    most_calls = 1

    def _read(self, pieces: list[tuple[str, str]], tools: bool) -> Said:
        content = pieces[0][1].strip()
        tagged = next((text for mark, text in pieces[1:] if mark == "<|python_tag|>"), None)
        text = content if tagged is None else tagged.strip()
        call = call_of(text, "parameters") or call_of(text)
        if call is not None and (tools or tagged is not None):
            return Said("" if tagged is None else content, None, (call,))
        return Said(content, fault="" if tagged is None else f"a call that cannot be read: {text!r:.60}")
