"""Chat formats: what a target said, read back from its token ids.

The way out, from turns to tokens, is the target's own template (template.py). The way back is needed where
a conversation goes on: the answer becomes a turn again, which the template then renders as it renders
history. A server does the same between two requests.

harmony.py   gpt-oss              chatml.py   Qwen, SmolLM2 and others        base.py   what all share
gemma4.py    Gemma 4              llama3.py   Llama 3
"""

from __future__ import annotations

from typing import Any

from data_prep.formats.base import ChatFormat, Said
from data_prep.formats.chatml import ChatML
from data_prep.formats.gemma4 import Gemma4
from data_prep.formats.harmony import Harmony
from data_prep.formats.llama3 import Llama3

FORMATS: tuple[type[ChatFormat], ...] = (Harmony, Gemma4, Llama3, ChatML)

__all__ = ["FORMATS", "ChatFormat", "Said", "format_of"]


def format_of(tokenizer: Any) -> ChatFormat | None:
    """The format whose marks all stand in the chat template and are control tokens of the tokenizer.

    None if there is no such format, or more than one: nothing is guessed.
    """
    added = {token.content for token in tokenizer.added_tokens_decoder.values()}
    template = tokenizer.get_chat_template()
    fitting = [
        kind for kind in FORMATS if all(mark in added and mark in template for mark in kind.recognised_by)
    ]
    return fitting[0](tokenizer) if len(fitting) == 1 else None
