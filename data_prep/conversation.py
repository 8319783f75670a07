"""A prompt on its way to rows: what the target is asked next, and what came of it.

Whoever answers (a worker with the target in it, a server) only does this, for every conversation:

    while (asked := conversation.next) is not None:
        conversation.answered(*answer(asked))
    rows = conversation.rows()
"""

from __future__ import annotations

from typing import Literal

from data_prep.chat import Rendered
from peagle_train.files import fingerprint
from peagle_train.store.answers import AnswerRow


class Conversation:
    """One prompt, its answers so far.

    Attributes:
        temperature, top_p: how it is to be answered; 0: greedily.
        key: names what is asked and how, by content alone: the same on every run and in any order.
    """

    def __init__(self, prompt: Rendered):
        self._prompt = prompt
        self.temperature, self.top_p = 0.0, 1.0
        self.key = fingerprint([prompt.set, prompt.token_ids, self.temperature, self.top_p])
        self._answer: list[int] | None = None
        self._finish: Literal["stop", "length"] = "stop"

    @property
    def next(self) -> list[int] | None:
        """Token ids up to and including the generation prompt; None: nothing is left to ask."""
        return self._prompt.token_ids if self._answer is None else None

    def answered(self, token_ids: list[int], finish: Literal["stop", "length"]) -> None:
        """Takes the tokens generated for `next`, end token included."""
        self._answer, self._finish = token_ids, finish

    def rows(self) -> list[AnswerRow]:
        """What the answers came to: one row, or several where a later turn is served with other tokens."""
        assert self._answer is not None
        prompt = self._prompt
        token_ids = [*prompt.token_ids, *self._answer]
        spans = [[len(prompt.token_ids), len(token_ids)]]
        return [AnswerRow(prompt.row, prompt.set, prompt.id, prompt.text, token_ids, spans, self._finish)]
