"""From a conversation to the token ids the target is served with.

The target's own chat template is the only authority: it is rendered with its generation prompt, and
the text it gives is tokenised as it stands. What a user typed must stay text. A prompt that spells one
of the tokenizer's control tokens (`<|im_end|>`, say) would become that token, end the user's turn and
forge the next one, so it is left out and counted.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from data_prep.prompts import Candidates, Message, prove_disjoint
from peagle_train.errors import PeagleError

TOO_LONG = "too long"  # more than data.max_prompt_tokens
CONTROL = "control token"  # spelled in the text of a turn
REPEATS = "repeats"  # the same text stands earlier in the set


@dataclass(frozen=True)
class Rendered:
    """One prompt, ready to be answered."""

    row: int  # index over all sets of the run
    set: str
    id: str
    text: str
    token_ids: list[int]


class ChatRenderer:
    """Renders prompts through one tokenizer's chat template."""

    def __init__(self, tokenizer: Any, system_prompt: str | None = None):
        """Raises PeagleError if the tokenizer has no chat template."""
        if not tokenizer.chat_template:
            raise PeagleError(
                f"target {tokenizer.name_or_path}: its tokenizer has no chat template, so nobody knows how "
                "it is served; use the instruction-tuned model, or put its chat_template.jinja beside "
                "tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._control = sorted(_control_texts(tokenizer))

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids up to and including the generation prompt."""
        turns = [{"role": message.role, "content": message.content} for message in messages]
        if self._system_prompt is not None and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self._system_prompt})
        text = self._tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def spells_control_token(self, messages: Sequence[Message]) -> str | None:
        """The first control token that a turn spells, or None."""
        for message in messages:
            for token in self._control:
                if token in message.content:
                    return token
        return None


def render_sets(
    renderer: ChatRenderer, sets: dict[str, Candidates], max_prompt_tokens: int
) -> tuple[list[Rendered], dict[str, dict[str, int]]]:
    """The first `count` prompts of each set that can be asked, numbered through all sets.

    Also what was passed over, by set and reason. A set may end up with fewer than its count.
    Raises PeagleError if a set loses all of its prompts, or if two sets share one.
    """
    rows: list[Rendered] = []
    left_out: dict[str, dict[str, int]] = {}
    for name, candidates in sets.items():
        before, reasons = len(rows), {TOO_LONG: 0, CONTROL: 0, REPEATS: candidates.repeats}
        for prompt in candidates.prompts:
            if len(rows) - before == candidates.count:
                break
            if renderer.spells_control_token(prompt.messages):
                reasons[CONTROL] += 1
                continue
            ids = renderer.render(prompt.messages)
            if len(ids) > max_prompt_tokens:
                reasons[TOO_LONG] += 1
                continue
            rows.append(Rendered(len(rows), name, prompt.id, prompt.text, ids))
        left_out[name] = {reason: count for reason, count in reasons.items() if count}
        if len(rows) == before:
            why = ", ".join(f"{count} {reason}" for reason, count in left_out[name].items())
            cure = "choose other prompts"
            if reasons[TOO_LONG]:
                cure = f"raise data.max_prompt_tokens (now {max_prompt_tokens}) or {cure}"
            raise PeagleError(
                f"set {name!r}: none of its {len(candidates.prompts)} prompts is left ({why}); {cure}"
            )
    prove_disjoint((row.set, row.id, row.text) for row in rows)
    return rows, left_out


def _control_texts(tokenizer: Any) -> set[str]:
    """Texts of added tokens that are special or look like markup; added runs of spaces do not count."""
    texts = set()
    for token in tokenizer.added_tokens_decoder.values():
        bracketed = token.content.startswith(("<", "[")) and token.content.endswith((">", "]"))
        if token.content.strip() and (token.special or bracketed):
            texts.add(token.content)
    return texts
