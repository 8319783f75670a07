"""From a conversation to the token ids the target is served with.

The target's own chat template is the only authority: it is rendered with its generation prompt, and
the text it gives is tokenised as it stands. What a user typed must stay text. A prompt that spells one
of the tokenizer's control tokens (`<|im_end|>`, say) would become that token, end the user's turn and
forge the next one, so it is left out and counted.

Some templates write today's date (harmony, Llama 3). Rows must not depend on the day they were made, so
such a template is told the day that the recipe names, and is refused where the recipe names none.
"""

from __future__ import annotations

import inspect
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import date, datetime
from typing import Any

from jinja2 import TemplateError

from data_prep.prompts import Candidates, Message, prove_disjoint
from data_prep.prompts.collect import CONTAMINATED
from peagle_train.errors import PeagleError
from peagle_train.target.tokens import control_texts

TOO_LONG = "too long"  # more than data.max_prompt_tokens
TOO_SHORT = "too short"  # fewer than data.min_prompt_tokens
CONTROL = "control token"  # spelled in the text of a turn
REPEATS = "repeats"  # the same text stands earlier in the set
ELSEWHERE = "in another set"  # held-out prompts are not trained on, whatever files they come from
REFUSED = "refused by the template"

_CLOCK = r"""strftime_now\(\s*('[^']*'|"[^"]*")\s*\)"""
_KEYS_FOR = {"strftime_now": "; set data.date", "messages": "; set data.system_prompt, or write the turns"}


_LATER = ("validation", "train")
_NO_DAY = "data.date=YYYY-MM-DD"


class RefusedTurnsError(PeagleError):
    """The target's chat template does not take these turns."""


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

    def __init__(
        self,
        tokenizer: Any,
        system_prompt: str | None = None,
        variables: Mapping[str, Any] | None = None,
        day: date | None = None,
    ):
        """variables: what the template reads besides the messages. day: what it is told as today.

        Raises PeagleError if the tokenizer has no chat template, and for a variable or a day that its
        template does not read.
        """
        if not tokenizer.chat_template:
            raise PeagleError(
                f"target {tokenizer.name_or_path}: its tokenizer has no chat template, so nobody knows how "
                "it is served; use the instruction-tuned model, or put its chat_template.jinja beside "
                "tokenizer.json"
            )
        self._tokenizer = tokenizer
        self._system_prompt = system_prompt
        self._variables = dict(variables or {})
        self._control = sorted(control_texts(tokenizer))
        _check_variables(self._variables, tokenizer)
        self._template = _told_the_day(tokenizer.get_chat_template(), day)

    def render(self, messages: Sequence[Message]) -> list[int]:
        """Token ids up to and including the generation prompt.

        Raises PeagleError if the template refuses the turns, or asks for a day that was not named.
        """
        turns = [{"role": message.role, "content": message.content} for message in messages]
        if self._system_prompt is not None and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self._system_prompt})
        try:
            text = self._tokenizer.apply_chat_template(
                turns,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
                **self._variables,
            )
        except TemplateError as error:
            kind = PeagleError if _NO_DAY in str(error) else RefusedTurnsError
            raise kind(
                f"target {self._tokenizer.name_or_path}: its chat template refuses turns of "
                f"{', '.join(turn['role'] for turn in turns)}: {error}"
            ) from error
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def spells_control_token(self, messages: Sequence[Message]) -> str | None:
        """The first control token that a turn spells, or None."""
        for message in messages:
            for token in self._control:
                if token in message.content:
                    return token
        return None


def render_sets(
    renderer: ChatRenderer, sets: dict[str, list[Candidates]], *, shortest: int, longest: int
) -> tuple[list[Rendered], dict[str, dict[str, int]]]:
    """The first `count` prompts of each part that can be asked, numbered through all sets.

    Also what was passed over, by set and reason. A text that several sets have goes to the held-out one, then
    to validation: nothing that is measured is trained on. A part may end up with fewer than its count.
    Raises PeagleError if a set loses all of its prompts.
    """
    owner: dict[str, str] = {}
    chosen: dict[str, list[Rendered]] = {}
    left_out: dict[str, dict[str, int]] = {}
    for name in [*(name for name in sets if name not in _LATER), *_LATER]:
        if name not in sets:
            continue
        reasons: Counter[str] = Counter()
        chosen[name] = []
        for part in sets[name]:
            reasons[REPEATS] += part.repeats
            reasons[CONTAMINATED] += part.contaminated
            taken = _take(renderer, part, name, owner, reasons, shortest=shortest, longest=longest)
            chosen[name] += taken
        left_out[name] = {reason: count for reason, count in reasons.items() if count}
        if not chosen[name]:
            raise _nothing_left(name, sets[name], left_out[name], longest)
    rows = [row for name in sets for row in chosen[name]]
    rows = [replace(row, row=number) for number, row in enumerate(rows)]
    prove_disjoint((row.set, row.id, row.text) for row in rows)
    return rows, {name: left_out[name] for name in sets}


def _take(
    renderer: ChatRenderer,
    part: Candidates,
    name: str,
    owner: dict[str, str],
    reasons: Counter[str],
    *,
    shortest: int,
    longest: int,
) -> list[Rendered]:
    """The first `count` prompts of a part that can be asked; `owner` says which set has a text."""
    taken: list[Rendered] = []
    for prompt in part.prompts:
        if len(taken) == part.count:
            break
        if prompt.text in owner:
            reasons[REPEATS if owner[prompt.text] == name else ELSEWHERE] += 1
            continue
        if renderer.spells_control_token(prompt.messages):
            reasons[CONTROL] += 1
            continue
        try:
            ids = renderer.render(prompt.messages)
        except RefusedTurnsError:
            reasons[REFUSED] += 1
            continue
        if not shortest <= len(ids) <= longest:
            reasons[TOO_LONG if len(ids) > longest else TOO_SHORT] += 1
            continue
        owner[prompt.text] = name
        taken.append(Rendered(0, name, prompt.id, prompt.text, ids))
    return taken


def _nothing_left(name: str, parts: list[Candidates], left_out: dict[str, int], longest: int) -> PeagleError:
    why = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    cure = "choose other prompts"
    if TOO_LONG in left_out:
        cure = f"raise data.max_prompt_tokens (now {longest}) or {cure}"
    number = sum(len(part.prompts) for part in parts)
    return PeagleError(f"set {name!r}: none of its {number} prompts is left ({why}); {cure}")


def _told_the_day(template: str, day: date | None) -> str:
    """The template with the clock it asks for, `strftime_now`, replaced by a macro that knows one day.

    transformers gives templates the clock itself and lets no caller replace it; a macro of that name in
    the template comes before it. Only formats that stand in the template can be told; without a day, none.
    """
    if "strftime_now" not in template:
        if day is not None:
            raise PeagleError(f"data.date: found {day}; but the target's chat template writes no date")
        return template
    told = {}
    if day is not None:
        formats = [quoted[1:-1] for quoted in re.findall(_CLOCK, template)]
        told = {format: datetime(day.year, day.month, day.day).strftime(format) for format in formats}
    unknown = (
        "it asks for today's date, which would change the rows from day to day; name the day in the recipe: "
        f"{_NO_DAY}"
        if day is None
        else "it asks for the date in a format that does not stand in the template; mend the template"
    )
    return (
        f"{{% macro strftime_now(format) %}}{{% set told = {json.dumps(told)} %}}{{% if format in told %}}"
        f"{{{{ told[format] }}}}{{% else %}}{{{{ raise_exception({json.dumps(unknown)}) }}}}{{% endif %}}"
        f"{{% endmacro %}}\n{template}"  # the newline after a block is dropped
    )


def _check_variables(variables: Mapping[str, Any], tokenizer: Any) -> None:
    """Raises PeagleError for a variable that would be ignored, or that is not the recipe's to set."""
    taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
    for name in variables:
        key = f"data.template_variables.{name}"
        if name in taken or name in _KEYS_FOR:
            raise PeagleError(f"{key}: the renderer itself sets `{name}`{_KEYS_FOR.get(name, '')}")
        if not re.search(rf"\b{re.escape(name)}\b", tokenizer.get_chat_template()):
            raise PeagleError(
                f"{key}: the target's chat template does not read `{name}`, so it would change nothing; "
                "look the name up in the template, or leave it out"
            )
