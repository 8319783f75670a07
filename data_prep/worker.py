"""A worker process: loads the target once, works off its batches, seals each on the disk.

Started by workers.py as `python -m data_prep.worker`; see jobs.py for what goes in and out. Of a batch
the states are sealed before the answers, so an answers batch on the disk always has its states.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch

from data_prep.answer import answer
from data_prep.child import end_with_parent, reports_to_parent
from data_prep.conversation import Conversation, Talk
from data_prep.jobs import Job, VllmPlan
from data_prep.sampling import Draw
from data_prep.teacher_forcing import forced_states
from data_prep.vllm_states.backend import VllmStates
from peagle_train.errors import PeagleError
from peagle_train.store.answers import AnswerRow, AnswerWriter
from peagle_train.store.states import DTYPES, StateRow, StateWriter
from peagle_train.target.adapter import Target

_REPORT_EVERY = 0.25  # seconds


class _Reporter:
    """Writes reports to the parent; token counts are gathered, so that reporting costs nothing."""

    def __init__(self, say: Callable[..., None]):
        self.say = say
        self._tokens, self._sent = 0, time.monotonic()

    def tokens(self, count: int) -> None:
        self._tokens += count
        if time.monotonic() - self._sent > _REPORT_EVERY:
            self.say(tokens=self._tokens)
            self._tokens, self._sent = 0, time.monotonic()


def main() -> int:
    """Reads the job from standard input; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches the parent, which ends all workers
    end_with_parent()
    reporter = _Reporter(reports_to_parent())
    job = Job.from_json(sys.stdin.read())
    if job.threads is not None:
        torch.set_num_threads(job.threads)
    try:
        _work(job, reporter)
    except PeagleError as error:
        reporter.say(fault=str(error))
        return 1
    return 0


def _work(job: Job, reporter: _Reporter) -> None:
    if job.vllm is not None:
        _extract_with_vllm(job, job.vllm, reporter)
        return
    target = Target.load(
        job.target,
        dtype=job.dtype,
        device=job.device,
        trust_remote_code=job.trust_remote_code,
        spread=job.parallel == "layers",
    )
    plan = job.states
    states = None
    if plan is not None:
        states = plan.writer()
    if job.kind == "extract":
        assert states is not None
        _extract(job, target, states, reporter, behind=target.device.type == "cuda")
        return
    talk = None if job.talk is None else Talk(job.talk, target.tokenizer)
    for batch in sorted(job.prompts):
        reporter.say(begin=batch)
        began = time.process_time()
        rows, tokens = _answer(job, batch, target, talk, states, reporter)
        reporter.say(done=batch, rows=rows, tokens=tokens, cpu=time.process_time() - began)


def _answer(
    job: Job, batch: int, target: Target, talk: Talk | None, states: StateWriter | None, reporter: _Reporter
) -> tuple[int, int]:
    """Answers one batch of prompts, all turns of them; how many rows and tokens came of it."""
    conversations = [Conversation(prompt, talk) for prompt in job.prompts[batch]]
    kept = _converse(job, target, conversations, states, reporter)
    rows = [row for conversation in conversations for row in conversation.rows()]
    if states is not None:
        # What came with its tokens was not generated in this pass.
        given = [row for row in rows if row.row not in kept]
        if given:
            dtype = DTYPES[states.dtype]
            tokens = [row.token_ids for row in given]
            forced = forced_states(target, tokens, states.aux_layers, dtype, job.batch_tokens)
            kept |= {row.row: found for row, found in zip(given, forced, strict=True)}
        states.write_batch(batch, [_state_row(row, *kept[row.row]) for row in rows])
    AnswerWriter(Path(job.answers_dir), job.answers_fingerprint).write_batch(batch, rows)
    return len(rows), sum(row.supervised for row in rows)


def _converse(
    job: Job,
    target: Target,
    conversations: Sequence[Conversation],
    states: StateWriter | None,
    reporter: _Reporter,
) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Asks turn after turn, all conversations at once; the states (aux, last) of every row.

    A row's states are those of the last turn in it: that pass sees all of its tokens.
    """
    kept: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
    while True:
        asked = [(conversation, ids) for conversation in conversations if (ids := conversation.next)]
        if not asked:
            return kept
        found = answer(
            target,
            [ids for _, ids in asked],
            max_new_tokens=job.max_new_tokens,
            draws=[Draw(one.temperature, one.top_p, one.seed) for one, _ in asked],
            aux_layers=states.aux_layers if states else (),
            keep=DTYPES[states.dtype] if states else None,
            on_tokens=reporter.tokens,
        )
        for (conversation, ids), answered in zip(asked, found, strict=True):
            conversation.answered(answered.token_ids[len(ids) :], answered.finish)
            if answered.aux is not None and answered.last is not None:
                kept[conversation.row] = (answered.aux, answered.last)


def _extract(job: Job, target: Target, states: StateWriter, reporter: _Reporter, *, behind: bool) -> None:
    """States of all batches, each sealed before it is reported.

    behind: a batch is written while the next one is computed. On a GPU checksums and the disk take about as
    long as the pass; on a CPU they take a hundredth of it, and would only disturb.
    """
    began = time.process_time()

    def done(batch: int, written: Future[None] | None) -> None:
        nonlocal began
        if written is not None:
            written.result()
        rows, ended = job.answered[batch], time.process_time()
        tokens = sum(len(row.token_ids) for row in rows)
        reporter.say(done=batch, rows=len(rows), tokens=tokens, cpu=ended - began)
        began = ended

    waiting: tuple[int, Future[None]] | None = None
    with ThreadPoolExecutor(1) as pool:
        for batch in sorted(job.answered):
            reporter.say(begin=batch)
            rows = job.answered[batch]
            tokens = [row.token_ids for row in rows]
            found = forced_states(
                target, tokens, states.aux_layers, DTYPES[states.dtype], job.batch_tokens, reporter.tokens
            )
            made = [_state_row(row, aux, last) for row, (aux, last) in zip(rows, found, strict=True)]
            if waiting is not None:  # no more than one, or the memory would fill where the disk is slow
                done(*waiting)
                waiting = None
            if behind:
                waiting = batch, pool.submit(states.write_batch, batch, made)
            else:
                states.write_batch(batch, made)
                done(batch, None)
        if waiting is not None:
            done(*waiting)


def _extract_with_vllm(job: Job, vllm: VllmPlan, reporter: _Reporter) -> None:
    plan = job.states
    assert plan is not None
    states = plan.writer()
    batches = [(batch, [row.token_ids for row in job.answered[batch]]) for batch in sorted(job.answered)]
    # A name that `remove_leftovers` clears away.
    with VllmStates(vllm, Path(plan.directory) / f".{Path(vllm.log).stem}.{os.getpid()}.partial") as engine:
        engine.start(job)
        began = time.process_time()
        for batch, found in engine.states(batches, reporter.tokens):
            rows = job.answered[batch]
            states.write_batch(
                batch, [_state_row(row, aux, last) for row, (aux, last) in zip(rows, found, strict=True)]
            )
            tokens, ended = sum(len(row.token_ids) for row in rows), time.process_time()
            # The processor time of vLLM is not in it.
            reporter.say(done=batch, rows=len(rows), tokens=tokens, cpu=ended - began)
            began = ended


def _state_row(row: AnswerRow, aux: torch.Tensor, last: torch.Tensor) -> StateRow:
    tokens, mask = torch.tensor(row.token_ids), torch.tensor(row.loss_mask)
    return StateRow(row.row, row.set, row.id, tokens, mask, aux, last, row.prompt_length)


if __name__ == "__main__":
    sys.exit(main())
