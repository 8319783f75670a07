"""From prompts to what the target is asked: rendered, told apart, numbered.

    candidates ──► turns.py ──► template.py ──► those that fit, no text twice, none that forges a turn
    of each set    what is      token ids       ──► Rendered, numbered through all sets
                   asked, how

A prompt reserves as many row numbers as it has answers to come, so numbers do not depend on the answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from data_prep.prompts import Candidates, Message, Prompt, prove_disjoint
from data_prep.prompts.collect import CONTAMINATED
from data_prep.template import ChatRenderer, RefusedTurnsError
from data_prep.turns import Turns, asks_of, draw
from peagle_train.errors import PeagleError
from peagle_train.files import fingerprint
from peagle_train.recipe.data import Sampling
from peagle_train.recipe.schema import Recipe
from peagle_train.target.facts import TargetFacts

__all__ = ["Asking", "ChatRenderer", "Dialog", "Given", "RefusedTurnsError", "Rendered", "render_sets"]

TOO_LONG = "too long"  # more than data.max_prompt_tokens
TOO_SHORT = "too short"  # fewer than data.min_prompt_tokens
NO_ROOM = "no room for an answer"  # with data.max_new_tokens, more than the target's positions
CONTROL = "control token"  # spelled in the text of a turn or a tool
REPEATS = "repeats"  # the same text stands earlier in the set
ELSEWHERE = "in another set"  # held-out prompts are not trained on, whatever files they come from
REFUSED = "refused by the template"
FOREIGN = "ids the target does not have"  # of rows that come with their tokens

_LATER = ("validation", "train")


@dataclass(frozen=True)
class Dialog:
    """What the later turns of a conversation need.

    turns: what comes on top before each answer; the first is in the prompt's tokens already.
    variables: for the chat template, over those of all prompts.
    """

    turns: tuple[tuple[Message, ...], ...]
    tools: tuple[dict[str, Any], ...] = ()
    variables: dict[str, Any] | None = None


@dataclass(frozen=True)
class Given:
    """Answers that came with the prompt: nothing is asked."""

    spans: list[list[int]]  # [start, end) of every generated turn
    finish: Literal["stop", "length"]


@dataclass(frozen=True)
class Rendered:
    """One prompt, ready to be asked; plain values alone, since it travels to workers as JSON.

    Attributes:
        row: index of its first row over all sets of the run; it may fill `asks` of them.
        token_ids: up to and including the first generation prompt; of a given row all of its tokens.
        temperature, top_p: how it is to be answered; 0: greedily. seed: of everything drawn.
        dialog: None where one answer is all.
    """

    row: int
    set: str
    id: str
    text: str
    token_ids: list[int]
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0
    dialog: Dialog | None = None
    given: Given | None = None

    @property
    def asks(self) -> int:
        """Answers to come at most, and rows."""
        return 1 if self.dialog is None else len(self.dialog.turns)

    @property
    def key(self) -> str:
        """Names what is asked and how, by content alone: the same on every run and in any order."""
        parts: list[Any] = [self.set, self.token_ids, self.temperature, self.top_p]
        parts += [self.seed] if self.temperature else []
        if self.dialog is not None:
            later = [[_plain(message) for message in turn] for turn in self.dialog.turns[1:]]
            parts += [later, list(self.dialog.tools), self.dialog.variables or {}]
        return fingerprint(parts)

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> Rendered:
        """Back from `dataclasses.asdict`, as JSON keeps it."""
        dialog, given = value.get("dialog"), value.get("given")
        if dialog is not None:
            turns = tuple(
                tuple(Message(**{**turn, "tool_calls": tuple(turn["tool_calls"])}) for turn in turns)
                for turns in dialog["turns"]
            )
            dialog = Dialog(turns, tuple(dialog["tools"]), dialog["variables"])
        return cls(**{**value, "dialog": dialog, "given": given and Given(**given)})


@dataclass(frozen=True)
class Asking:
    """How prompts become questions, as the recipe says it.

    Attributes:
        turns, sampling, max_new_tokens: of the recipe's data.
        seed: of the recipe; it matters where a temperature is drawn.
        vocab_size, max_positions: of the target; None: no limit is looked at.
        ends: the tokens that end an answer; of rows that come with their tokens.
    """

    turns: Turns = "last"
    sampling: tuple[Sampling, ...] = ()
    max_new_tokens: int = 0
    seed: int = 0
    vocab_size: int | None = None
    max_positions: int | None = None
    ends: tuple[int, ...] = ()

    @classmethod
    def of(cls, recipe: Recipe, facts: TargetFacts, ends: Sequence[int]) -> Asking:
        """That of a recipe and its target."""
        data = recipe.data
        return cls(
            turns=data.turns,
            sampling=tuple(data.sampling),
            max_new_tokens=data.max_new_tokens,
            seed=recipe.seed,
            vocab_size=facts.vocab_size,
            max_positions=facts.max_position_embeddings,
            ends=tuple(ends),
        )


def render_sets(
    renderer: ChatRenderer,
    sets: dict[str, list[Candidates]],
    *,
    shortest: int,
    longest: int,
    asking: Asking | None = None,
) -> tuple[list[Rendered], dict[str, dict[str, int]]]:
    """The first `count` prompts of each part that can be asked, numbered through all sets.

    Also what was passed over, by set and reason. A text that several sets have goes to the held-out one, then
    to validation: nothing that is measured is trained on. A part may end up with fewer than its count.
    Raises PeagleError if a set loses all of its prompts, and for variables of a way that the template does
    not read.
    """
    asking = asking or Asking()
    for number, way in enumerate(asking.sampling):
        renderer.check_variables(way.template_variables, f"data.sampling.{number}.template_variables")
    choice = _Choice(renderer, asking, shortest, longest)
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
            chosen[name] += choice.take(part, name, reasons)
        left_out[name] = {reason: count for reason, count in reasons.items() if count}
        if not chosen[name]:
            raise _nothing_left(name, sets[name], left_out[name], longest)
    rows: list[Rendered] = []
    number = 0
    for prompt in (prompt for name in sets for prompt in chosen[name]):
        rows.append(replace(prompt, row=number))
        number += prompt.asks
    prove_disjoint((row.set, row.id, row.text) for row in rows)
    return rows, {name: left_out[name] for name in sets}


class _Choice:
    """Chooses prompts, set after set, and remembers whose a text is."""

    def __init__(self, renderer: ChatRenderer, asking: Asking, shortest: int, longest: int):
        self._renderer, self._asking = renderer, asking
        self._shortest, self._longest = shortest, longest
        self._owner: dict[str, str] = {}  # the set that has a text
        self._given: set[str] = set()  # rows that came with their tokens: a prompt may have several

    def take(self, part: Candidates, name: str, reasons: Counter[str]) -> list[Rendered]:
        """The first `count` prompts of a part that can be asked; counts the others under their reason."""
        taken: list[Rendered] = []
        for prompt in part.prompts:
            if len(taken) == part.count:
                break
            found = self._given_row(prompt, name) if prompt.answered else self._asked(prompt, name)
            if isinstance(found, str):
                reasons[found] += 1
            else:
                self._owner[found.text] = name
                taken.append(found)
        return taken

    def _asked(self, prompt: Prompt, name: str) -> Rendered | str:
        """The prompt, rendered, or why it is left out."""
        asks = asks_of(prompt.messages, self._asking.turns)
        told = [message for ask in asks for message in ask]
        text = "\n\n".join(message.content for message in told)
        if text in self._owner:
            return REPEATS if self._owner[text] == name else ELSEWHERE
        if self._renderer.spells_control_token(told, prompt.tools):
            return CONTROL
        way = draw(self._asking.sampling, name, fingerprint([[_plain(turn) for turn in told], prompt.tools]))
        try:
            ids = self._renderer.render(asks[0], prompt.tools, way.variables)
            named = prompt.tools or any(turn.tool_calls for turn in told)
            if named and self._renderer.forges(ids, asks[0], prompt.tools, way.variables):
                return CONTROL
        except RefusedTurnsError:
            return REFUSED
        if not self._shortest <= len(ids) <= self._longest:
            return TOO_LONG if len(ids) > self._longest else TOO_SHORT
        if not self._fits(len(ids) + self._asking.max_new_tokens):
            return NO_ROOM
        dialog = Dialog(tuple(asks), prompt.tools, way.variables) if len(asks) > 1 else None
        seed = self._asking.seed
        return Rendered(0, name, prompt.id, text, ids, way.temperature, way.top_p, seed, dialog)

    def _given_row(self, prompt: Prompt, name: str) -> Rendered | str:
        """A row that came with its tokens, or why it is left out. What follows its last answer is cut."""
        assert prompt.answered is not None
        spans = [list(span) for span in prompt.answered.spans]
        ids = list(prompt.answered.token_ids[: spans[-1][1]])
        if not all(id >= 0 and id < (self._asking.vocab_size or id + 1) for id in ids):
            return FOREIGN
        whole = fingerprint(ids)
        text = self._renderer.text(ids[: spans[0][0]])
        if whole in self._given:
            return REPEATS
        if self._owner.get(text, name) != name:
            return ELSEWHERE
        if not self._shortest <= spans[0][0] <= self._longest:
            return TOO_LONG if spans[0][0] > self._longest else TOO_SHORT
        if not self._fits(len(ids)):
            return NO_ROOM
        self._given.add(whole)
        finish: Literal["stop", "length"] = "stop" if ids[-1] in self._asking.ends else "length"
        return Rendered(0, name, prompt.id, text, ids, given=Given(spans, finish))

    def _fits(self, tokens: int) -> bool:
        return self._asking.max_positions is None or tokens <= self._asking.max_positions


def _plain(message: Message) -> list[Any]:
    return [message.role, message.content, message.reasoning, list(message.tool_calls), message.name]


def _nothing_left(name: str, parts: list[Candidates], left_out: dict[str, int], longest: int) -> PeagleError:
    why = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
    cure = "choose other prompts"
    if TOO_LONG in left_out:
        cure = f"raise data.max_prompt_tokens (now {longest}) or {cure}"
    elif NO_ROOM in left_out:
        cure = f"lower data.max_new_tokens or {cure}"
    elif FOREIGN in left_out:
        cure = "check that the rows' token ids were made with this target's tokenizer"
    number = sum(len(part.prompts) for part in parts)
    return PeagleError(f"set {name!r}: none of its {number} prompts is left ({why}); {cure}")
