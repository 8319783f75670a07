"""From turns to the token ids the target is served with.

The target's own chat template is the only authority: it is rendered with its generation prompt, and
the text it gives is tokenised as it stands. What a user typed must stay text. A turn, a tool or a tool's
result that spells one of the tokenizer's control tokens (`<|im_end|>`, say) would become that token, end
the turn and forge the next one: whoever renders asks `spells_control_token` first.

Some templates write today's date (harmony, Llama 3). Rows must not depend on the day they were made, so
such a template is told the day that the recipe names, and is refused where the recipe names none.
"""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from datetime import date, datetime
from typing import Any

from jinja2 import TemplateError

from data_prep.formats import format_of
from data_prep.prompts import Message
from peagle_train.errors import PeagleError
from peagle_train.target.tokens import control_texts

_CLOCK = r"""strftime_now\(\s*('[^']*'|"[^"]*")\s*\)"""
_KEYS_FOR = {
    "strftime_now": "; set data.date",
    "messages": "; set data.system_prompt, or write the turns",
    "tools": "; give the rows of data a column `tools`",
}
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
"""Names under which templates read the thoughts of a turn."""

_NO_DAY = "data.date=YYYY-MM-DD"


class RefusedTurnsError(PeagleError):
    """The target's chat template does not take these turns."""


class ChatRenderer:
    """Renders prompts through one tokenizer's chat template.

    Attributes:
        format: how answers are read back; None where the tokenizer's format is not known.
    """

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
        self.format = format_of(tokenizer)
        self._tokenizer = tokenizer
        self._source: str = tokenizer.get_chat_template()
        self._system_prompt = system_prompt
        self._variables = dict(variables or {})
        self._control = sorted(control_texts(tokenizer))
        self.check_variables(self._variables)
        self._thoughts = [name for name in _THOUGHTS if self._reads(name)]
        self._template = _told_the_day(self._source, day)

    def render(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> list[int]:
        """Token ids up to and including the generation prompt.

        Args:
            tools: what the target may call, as JSON schemas of functions.
            variables: put over those of all prompts.

        Raises PeagleError if the template refuses the turns, or asks for a day that was not named.
        """
        turns = self._turns(messages)
        where = f"target {self._tokenizer.name_or_path}: its chat template"
        for name, given in (("tools", tools), ("tool_calls", any(turn.tool_calls for turn in messages))):
            if given and not self._reads(name):
                raise RefusedTurnsError(f"{where} does not read `{name}`, so the target never hears of them")
        settings: dict[str, Any] = {**self._variables, **(variables or {})}
        if tools:
            settings["tools"] = [_function(tool) for tool in tools]
        try:
            text = self._tokenizer.apply_chat_template(
                turns,
                chat_template=self._template,
                tokenize=False,
                add_generation_prompt=True,
                **settings,
            )
        except (TemplateError, TypeError) as error:  # TypeError: a template that adds None to a text
            kind = PeagleError if _NO_DAY in str(error) else RefusedTurnsError
            raise kind(
                f"{where} refuses turns of {', '.join(turn['role'] for turn in turns)}: {error}"
            ) from error
        return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])

    def text(self, token_ids: Sequence[int]) -> str:
        """Tokens as text, control tokens spelled out."""
        return str(self._tokenizer.decode(list(token_ids), skip_special_tokens=False))

    def check_variables(self, variables: Mapping[str, Any], key: str = "data.template_variables") -> None:
        """Raises PeagleError for a variable that would be ignored, or that is not the recipe's to set."""
        tokenizer = self._tokenizer
        taken = {*inspect.signature(tokenizer.apply_chat_template).parameters, *tokenizer.special_tokens_map}
        for name in variables:
            if name in taken or name in _KEYS_FOR:
                raise PeagleError(f"{key}.{name}: the renderer itself sets `{name}`{_KEYS_FOR.get(name, '')}")
            if not self._reads(name):
                raise PeagleError(
                    f"{key}.{name}: the target's chat template does not read `{name}`, so it would change "
                    "nothing; look the name up in the template, or leave it out"
                )

    def spells_control_token(
        self, messages: Sequence[Message], tools: Sequence[Mapping[str, Any]] = ()
    ) -> str | None:
        """The first control token that a turn or a tool spells, or None.

        Templates write names next to marks of their own, so a name with `<` or `>` counts as one.
        """
        given = [[turn.content, turn.reasoning, turn.name, turn.tool_calls] for turn in messages]
        for text in _texts([given, tools]):
            for token in self._control:
                if token in text:
                    return token
        named = [[{"name": turn.name}, turn.tool_calls] for turn in messages]
        return next((name for name in _names([named, tools]) if "<" in name or ">" in name), None)

    def _turns(self, messages: Sequence[Message]) -> list[dict[str, Any]]:
        turns = _template_turns(messages, self._thoughts)
        if self._system_prompt is not None and turns[0]["role"] != "system":
            turns.insert(0, {"role": "system", "content": self._system_prompt})
        most = self.format.most_calls if self.format is not None else None
        if most is not None and any(len(message.tool_calls) > most for message in messages):
            raise RefusedTurnsError(
                f"target {self._tokenizer.name_or_path}: its chat template writes {most} call a turn and "
                "drops the others; expected a turn for each call"
            )
        return turns

    def _reads(self, name: str) -> bool:
        return re.search(rf"\b{re.escape(name)}\b", self._source) is not None


def _template_turns(messages: Sequence[Message], thoughts: Sequence[str]) -> list[dict[str, Any]]:
    """Turns as a server hands them to a template: calls have ids, and results name the call they answer."""
    turns: list[dict[str, Any]] = []
    waiting: list[tuple[str, str]] = []  # id and name of calls without a result yet
    made = 0
    for message in messages:
        turn: dict[str, Any] = {"role": message.role, "content": message.content}
        if message.reasoning is not None:
            turn |= {name: message.reasoning for name in thoughts}
        if message.tool_calls:
            waiting = [(f"call{made + n:05d}", call["name"]) for n, call in enumerate(message.tool_calls)]
            made += len(waiting)
            turn["tool_calls"] = [
                {"id": id, "type": "function", "function": dict(call)}
                for (id, _), call in zip(waiting, message.tool_calls, strict=True)
            ]
        if message.role == "tool":
            mine = next(
                (call for call in waiting if call[1] == message.name), waiting[0] if waiting else None
            )
            if mine is not None:
                waiting.remove(mine)
                turn |= {"tool_call_id": mine[0], "name": mine[1]}
            elif message.name is not None:
                turn["name"] = message.name
        turns.append(turn)
    return turns


def _function(tool: Mapping[str, Any]) -> dict[str, Any]:
    return dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)}


def _texts(value: Any) -> Iterator[str]:
    """All texts in a JSON value, keys too."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, inner in value.items():
            yield from (str(key), *_texts(inner))
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _texts(inner)


def _names(value: Any) -> Iterator[str]:
    """All keys in a JSON value, and what stands under `name`."""
    if isinstance(value, Mapping):
        for key, inner in value.items():
            yield str(key)
            if key == "name" and isinstance(inner, str):
                yield inner
            yield from _names(inner)
    elif isinstance(value, list | tuple):
        for inner in value:
            yield from _names(inner)


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
