"""A prompt on its way to rows: what the target is asked next, and what came of it.

Whoever answers (a worker with the target in it, a server) only does this, for every conversation:

    while (asked := conversation.next) is not None:
        conversation.answered(*answer(asked))
    rows = conversation.rows()

Each turn is trained as it was generated. Where the next prompt begins with exactly the tokens so far, the
turns share a row; where the template renders history otherwise (it drops earlier thoughts, say, or text is
tokenised in another way than it was generated), a new row begins:

    p p p a a a e                    row 0: asked p, answered a
    p p p a a a e q q b b e          row 0 goes on, two spans: the next prompt began with all of it
    p p p c c e q q q b b b e        row 1, one span: the first answer is history now, and rendered as such
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import date
from typing import Any, Literal

from data_prep.chat import ChatRenderer, RefusedTurnsError, Rendered
from data_prep.formats import FORMATS
from peagle_train.errors import PeagleError
from peagle_train.recipe.data import DataSection
from peagle_train.store.answers import AnswerRow
from peagle_train.target.facts import TargetFacts

CUT = "cut at max_new_tokens"
CALLS = "a tool is called"  # whose result nobody has
UNREADABLE = "unreadable"  # in the target's format
CONTROL = "spells a control token"  # which would become one in the history
REFUSED = "refused by the template"
TOO_LONG = "too long"


@dataclass(frozen=True)
class TalkPlan:
    """What `Talk` is made of besides the tokenizer, as plain values: it travels to workers as JSON.

    max_prompt_tokens: of every prompt, its history counted; with max_new_tokens the longest row there is.
    max_positions: of the target; no row becomes longer.
    """

    system_prompt: str | None
    variables: dict[str, Any]
    day: str | None
    max_prompt_tokens: int
    max_new_tokens: int
    max_positions: int

    @classmethod
    def of(cls, data: DataSection, facts: TargetFacts) -> TalkPlan | None:
        """That of a recipe; None where every conversation has one answer."""
        if data.turns == "last":
            return None
        return cls(
            system_prompt=data.system_prompt,
            variables=dict(data.template_variables),
            day=data.date,
            max_prompt_tokens=data.max_prompt_tokens,
            max_new_tokens=data.max_new_tokens,
            max_positions=facts.max_position_embeddings,
        )


class Talk:
    """What it takes to go on after an answer: the way from tokens to turns and back."""

    def __init__(self, plan: TalkPlan, tokenizer: Any):
        """Raises PeagleError if the tokenizer's chat format is not one that can be read back."""
        self.plan = plan
        day = None if plan.day is None else date.fromisoformat(plan.day)
        self.renderer = ChatRenderer(tokenizer, plan.system_prompt, plan.variables, day)
        if self.renderer.format is None:
            known = ", ".join(f"{kind.name} ({' '.join(kind.recognised_by)})" for kind in FORMATS)
            raise PeagleError(
                f"target {tokenizer.name_or_path}: its chat format is none of {known}, told by these control "
                "tokens in its template, so its answers cannot be read back as history; set data.turns: "
                "last, or add the format to data_prep/formats"
            )
        self.format = self.renderer.format


@dataclass
class _Row:
    token_ids: list[int]
    spans: list[list[int]]
    finish: Literal["stop", "length"]


class Conversation:
    """One prompt, its answers so far.

    Attributes:
        temperature, top_p: how it is to be answered; 0: greedily.
        key: names what is asked and how, by content alone: the same on every run and in any order.
        stopped: why later turns were not asked; "": all of them were.
    """

    def __init__(self, prompt: Rendered, talk: Talk | None = None):
        """talk: needed where the prompt has more than one turn to ask."""
        if talk is None and prompt.dialog is not None:
            raise ValueError(f"{prompt.id}: {prompt.asks} turns to ask, and no Talk to go on with")
        self._prompt, self._talk = prompt, talk
        self.temperature, self.top_p, self.key = prompt.temperature, prompt.top_p, prompt.key
        self.stopped = ""
        self._history = list(prompt.dialog.turns[0]) if prompt.dialog else []
        self._asked = 0
        self._next: list[int] | None = prompt.token_ids
        self._rows: list[_Row] = []
        if prompt.given is not None:
            self._rows.append(_Row(prompt.token_ids, prompt.given.spans, prompt.given.finish))
            self._next = None

    @property
    def next(self) -> list[int] | None:
        """Token ids up to and including the generation prompt; None: nothing is left to ask."""
        return self._next

    @property
    def row(self) -> int:
        """Index of the row that the last answer is in."""
        return self._prompt.row + len(self._rows) - 1

    @property
    def seed(self) -> int:
        """Of what is drawn for `next`, where the temperature is above 0: 63 bits."""
        return (int(self.key, 16) + self._asked) % (1 << 63)

    def answered(self, token_ids: Sequence[int], finish: Literal["stop", "length"]) -> None:
        """Takes the tokens generated for `next`, end token included."""
        asked, answer = self._next, list(token_ids)
        if asked is None or not answer:
            raise ValueError(f"{self._prompt.id}: {'nothing was asked' if asked is None else 'no tokens'}")
        span = [len(asked), len(asked) + len(answer)]
        so_far = self._rows[-1].token_ids if self._rows else []
        if so_far and asked[: len(so_far)] == so_far:
            self._rows[-1] = _Row(asked + answer, [*self._rows[-1].spans, span], finish)
        else:
            self._rows.append(_Row(asked + answer, [span], finish))
        self._asked += 1
        self._next = None
        if self._asked < self._prompt.asks:
            following = CUT if finish == "length" else self._following(asked, answer)
            if isinstance(following, str):
                self.stopped = following
            else:
                self._next = following

    def rows(self) -> list[AnswerRow]:
        """What the answers came to: one row, or several where a later turn is served with other tokens."""
        prompt = self._prompt
        return [
            AnswerRow(
                prompt.row + place,
                prompt.set,
                prompt.id,
                prompt.text,
                row.token_ids,
                row.spans,
                row.finish,
                prompt.temperature,
                self.stopped if place == len(self._rows) - 1 else "",
            )
            for place, row in enumerate(self._rows)
        ]

    def _following(self, asked: list[int], answer: list[int]) -> list[int] | str:
        """The next prompt, with the answer as history, or why there is none."""
        talk, dialog = self._talk, self._prompt.dialog
        assert talk is not None and dialog is not None
        said = talk.format.read(asked, answer, tools=bool(dialog.tools))
        if said.tool_calls:
            return CALLS
        if said.fault:
            return UNREADABLE
        if talk.renderer.spells_control_token([said.message]):
            return CONTROL
        self._history += [said.message, *dialog.turns[self._asked]]
        try:
            ids = talk.renderer.render(self._history, dialog.tools, dialog.variables)
            if talk.renderer.forges(ids, self._history, dialog.tools, dialog.variables):
                return CONTROL
        except RefusedTurnsError:
            return REFUSED
        if len(ids) > min(talk.plan.max_prompt_tokens, talk.plan.max_positions - talk.plan.max_new_tokens):
            return TOO_LONG
        return ids
