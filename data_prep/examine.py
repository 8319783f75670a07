"""The doctor's checks of prompts, chat template and answers (peagle_train/doctor/examine.py names them)."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from rich.text import Text

from data_prep.answer import answer
from data_prep.chat import Asking, ChatRenderer, render_sets
from data_prep.conversation import Conversation, Talk, TalkPlan
from data_prep.prompts import Message, Rejects, collect
from data_prep.sampling import Draw
from data_prep.show import marked
from data_prep.teacher_forcing import forced_states
from peagle_train.doctor.patient import Line, Patient, failure, ok, warning
from peagle_train.store import AnswerRow, StateRow, StateStore, StateWriter
from peagle_train.store.states import DTYPES
from peagle_train.target.tokens import control_texts

_SHOWN = 2


def prompts(patient: Patient) -> Iterator[Line]:
    """A handful of every set, through the target's own chat template."""
    data = patient.small.data
    renderer = ChatRenderer(patient.tokenizer, data.system_prompt, data.template_variables, data.day)
    rejects = Rejects(most=data.max_rejects)
    candidates = collect(data, rejects)
    rejects.close()
    if rejects.total:
        yield warning(
            f"{rejects.total:,} bad rows are left out, fewer than data.max_rejects allows",
            "`peagle prepare` quotes them in rejects.jsonl",
        )
    rows, left_out = render_sets(
        renderer,
        candidates,
        shortest=data.min_prompt_tokens,
        longest=data.max_prompt_tokens,
        asking=Asking.of(patient.small, patient.facts, patient.end_token_ids),
    )
    patient.renderer, patient.asked = renderer, rows
    for name in dict.fromkeys(row.set for row in rows):
        mine = [row for row in rows if row.set == name]
        longest = max(len(row.token_ids) for row in mine)
        reasons = "".join(f", {count} {reason}" for reason, count in left_out.get(name, {}).items())
        yield ok(f"{name}: {len(mine)} rendered, the longest {longest:,} tokens{reasons}")


def control_tokens(patient: Patient) -> Iterator[Line]:
    """A user who types one must not forge a turn: such a prompt is left out, whatever surrounds the mark."""
    marks = sorted(control_texts(patient.tokenizer))
    passed = [
        mark
        for mark in marks
        for text in (mark, f"x{mark}y")
        if patient.renderer.spells_control_token([Message("user", text)]) is None
    ]
    if passed:
        yield failure(
            f"a user's text {passed[0]!r} would become a control token ({len(passed)} texts in all)",
            "data_prep/chat.py must leave such prompts out: report it with the tokenizer's name",
        )
    elif not marks:
        yield warning(
            "the tokenizer names no control tokens, so none can be told from text",
            "check its tokenizer_config.json: are its special tokens marked special?",
        )
    else:
        yield ok(f"{len(marks)} control tokens; a prompt that spells one is left out and counted")


def answers(patient: Patient) -> Iterator[Line]:
    """The target answers; its tokens, and only these, are supervised. Leaves rows and their states."""
    target = patient.target
    assert target is not None
    plan = TalkPlan.of(patient.small.data, patient.facts)
    talk = None if plan is None else Talk(plan, patient.tokenizer)
    conversations = [Conversation(row, talk) for row in patient.asked]
    while open_ones := [conversation for conversation in conversations if conversation.next is not None]:
        asked = [list(conversation.next or ()) for conversation in open_ones]
        draws = [Draw(one.temperature, one.top_p, one.seed) for one in open_ones]
        found = answer(target, asked, max_new_tokens=patient.small.data.max_new_tokens, draws=draws)
        for conversation, said in zip(open_ones, found, strict=True):
            conversation.answered(said.token_ids[said.prompt_length :], said.finish)
    patient.rows = [row for conversation in conversations for row in conversation.rows()]
    patient.shown = _shown(patient)
    empty = [row.id for row in patient.rows if not any(row.loss_mask)]
    if empty:
        yield failure(
            f"{len(empty)} of {len(patient.rows)} rows have an all-zero loss mask, the first {empty[0]}",
            "nothing could be learned from them; look at the rows below: is it the template or the answers?",
        )
        return
    forged = [row.id for row in patient.rows if row.loss_mask[0]]
    if forged:
        yield failure(f"the first token of {forged[0]} is supervised, but no one generated it", "report it")
        return
    patient.store = _stored(patient)
    ended = sum(row.finish == "stop" for row in patient.rows)
    tokens = sum(row.supervised for row in patient.rows)
    yield ok(
        f"{len(patient.rows)} rows, {tokens} supervised tokens; {ended} answers ended by themselves within "
        f"{patient.small.data.max_new_tokens} tokens"
    )
    single = sum(row.supervised < 2 for row in patient.rows)
    if single:
        yield warning(
            f"{single} of {len(patient.rows)} answers are one token long: nothing is drafted there",
            "look at the rows below: does the target get the prompt it was trained on?",
        )


def _shown(patient: Patient) -> list[Text]:
    rows = sorted(patient.rows, key=lambda row: len(row.token_ids))[:_SHOWN]
    return [marked(row, patient.tokenizer, colour=patient.colour) for row in rows]


def _stored(patient: Patient) -> StateStore:
    """The states of the rows, as `extract` stores them, in the patient's room."""
    target, recipe = patient.target, patient.recipe
    assert target is not None
    directory = patient.room / "states"
    directory.mkdir()
    layers, dtype = list(recipe.head.aux_layers), recipe.states.dtype
    writer = StateWriter(directory, "doctor", layers, patient.facts.hidden_size, dtype)
    found = forced_states(target, [row.token_ids for row in patient.rows], layers, DTYPES[dtype])
    writer.write_batch(0, [_row(row, *states) for row, states in zip(patient.rows, found, strict=True)])
    writer.seal()
    return StateStore(directory)


def _row(row: AnswerRow, aux: torch.Tensor, last: torch.Tensor) -> StateRow:
    ids, mask = torch.tensor(row.token_ids), torch.tensor(row.loss_mask)
    return StateRow(row.row, row.set, row.id, ids, mask, aux, last, row.prompt_length)
