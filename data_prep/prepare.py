"""The stage `prepare`: prompts of every set, answered by the target.

    prompts/ ──► chat.py ──► batches of like length ──► workers (worker.py) ──► answers/  and, in the same
    of each set   token ids    (jobs.py)                                       ──► states/   pass, the states

With states.keep_while_answering the states store is finished here as well, under the fingerprint that
`extract` will ask for. Resumed batch by batch: what is sealed on the disk is not done again.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from data_prep.chat import Asking, ChatRenderer, Rendered, render_sets
from data_prep.conversation import Talk, TalkPlan
from data_prep.jobs import Job, StatesPlan, even_batches
from data_prep.plan import (
    check_disk,
    extract_parts,
    prepare_parts,
    states_plan,
    target_folder,
)
from data_prep.prompts import Rejects, collect
from data_prep.prompts.rejects import FILE
from data_prep.server import answer_by_server
from data_prep.server.stage import Answering
from data_prep.workers import Work, run_jobs, split_job
from peagle_train.files import fingerprint, remove_leftovers
from peagle_train.recipe.data import DataSection
from peagle_train.run import Run
from peagle_train.stages import StageResult, begin, finished, seal
from peagle_train.store import AnswerWriter, SetCounts
from peagle_train.target.mask_token import resolve_mask_token
from peagle_train.target.tokens import end_tokens_of


def prepare(run: Run, console: Console) -> StageResult:
    """Answers all prompts of the run.

    Raises PeagleError: a prompt source, the chat template, the disk, a worker; see the message.
    """
    folder = target_folder(run, console)
    parts = prepare_parts(run, folder)
    done = finished(run.answers_dir, parts, console)
    if done is not None:
        return done
    started = time.monotonic()
    rows, left_out = _rows(run, folder, console)
    batches = even_batches(rows, run.recipe.data.batch_size)
    server = run.recipe.data.server
    keep = run.recipe.states.kept_while_answering and server is None
    of_states = extract_parts(run, fingerprint(parts))
    plan: StatesPlan | None = None

    writer = AnswerWriter(run.answers_dir, fingerprint(parts))
    begin(run.answers_dir, parts, console)
    remove_leftovers(run.answers_dir)
    if keep and finished(run.states_dir, of_states, console) is None:
        begin(run.states_dir, of_states, console)
        remove_leftovers(run.states_dir)
        plan = states_plan(run, of_states)
    sealed = writer.sealed_batches()
    todo = {batch: prompts for batch, prompts in batches.items() if batch not in sealed}
    if sealed:
        console.print(f"{len(sealed)} of {len(batches)} batches are there already", highlight=False)
    work: Work | Answering | None = None
    if todo and server is not None:
        tokenizer = _tokenizer(run, folder)
        work = answer_by_server(
            server,
            todo,
            writer,
            talk=_talk(run, tokenizer),
            max_new_tokens=run.recipe.data.max_new_tokens,
            vocab_size=run.facts.vocab_size,
            ends=_ends(run, folder, tokenizer),
            console=console,
        )
    elif todo:
        work = _answer(run, folder, todo, plan, writer, console)
    if plan is not None:
        _seal_states(run, plan, of_states, batches)
    for name, unasked in _unasked(rows, writer).items():
        left_out[name] |= unasked
    counts = writer.seal(left_out)
    report(counts, left_out, console)
    generated = sum(count.generated_tokens for count in counts.values())
    number = sum(count.rows for count in counts.values())
    message = f"{number:,} rows, {generated:,} tokens generated"
    if work is not None:
        message += f" ({work.rate})"
    return seal(run.answers_dir, parts, time.monotonic() - started, message)


def report(counts: dict[str, SetCounts], left_out: dict[str, dict[str, int]], console: Console) -> None:
    """Prints what each set came to."""
    table = Table(title="answers")
    table.add_column("set")
    for heading in ("rows", "prompt tokens", "generated", "truncated", "empty"):
        table.add_column(heading, justify="right")
    table.add_column("left out")
    for name, count in counts.items():
        reasons = ", ".join(f"{number} {reason}" for reason, number in left_out.get(name, {}).items())
        numbers = (count.rows, count.prompt_tokens, count.generated_tokens, count.truncated, count.empty)
        table.add_row(name, *(f"{number:,}" for number in numbers), reasons or "-")
    console.print(table)
    console.print(
        "truncated: cut at data.max_new_tokens; empty: one token, so nothing is drafted or trained; "
        "too long: over data.max_prompt_tokens",
        style="dim",
        highlight=False,
    )


def _rows(run: Run, folder: Path, console: Console) -> tuple[list[Rendered], dict[str, dict[str, int]]]:
    data, tokenizer = run.recipe.data, _tokenizer(run, folder)
    renderer = ChatRenderer(tokenizer, data.system_prompt, data.template_variables, data.day)
    ends = _ends(run, folder, tokenizer)
    _talk(run, tokenizer)  # a format that cannot be read back is refused before anything is asked
    rejects = Rejects(run.answers_dir.with_name(FILE), data.max_rejects)
    candidates = collect(data, rejects)
    rejects.close()
    if rejects.total:
        console.print(f"{rejects.total:,} bad rows are left out; they are quoted in {rejects.path}")
    rows, left_out = render_sets(
        renderer,
        candidates,
        shortest=data.min_prompt_tokens,
        longest=data.max_prompt_tokens,
        asking=Asking.of(run.recipe, run.facts, ends),
    )
    mask_token = run.recipe.head.mask_token
    if mask_token is not None:
        # Training needs it, but a bad one should cost seconds, not the hours of answering.
        asked = {token for row in rows for token in row.token_ids}
        resolve_mask_token(mask_token, tokenizer, run.facts.vocab_size, asked, ends)
    return rows, left_out


def _tokenizer(run: Run, folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(folder, trust_remote_code=run.recipe.target.trust_remote_code)


def _ends(run: Run, folder: Path, tokenizer: Any) -> tuple[int, ...]:
    """The tokens at which an answer ends."""
    trust = run.recipe.target.trust_remote_code
    return end_tokens_of(folder, tokenizer, run.facts.model, trust_remote_code=trust)


def _talk(run: Run, tokenizer: Any) -> Talk | None:
    """What conversations of several turns need; None where each has one answer."""
    plan = TalkPlan.of(run.recipe.data, run.facts)
    return None if plan is None else Talk(plan, tokenizer)


def _answer(
    run: Run,
    folder: Path,
    todo: dict[int, list[Rendered]],
    plan: StatesPlan | None,
    writer: AnswerWriter,
    console: Console,
) -> Work:
    target, data = run.recipe.target, run.recipe.data
    prompts = [row for rows in todo.values() for row in rows]
    sizes = [size for row in prompts for size in _sizes(row, data)]
    check_disk(run.directory, sizes, plan, console)
    job = Job(
        kind="answer",
        target=str(folder),
        dtype=target.dtype,
        device=target.device,
        trust_remote_code=target.trust_remote_code,
        threads=1,
        states=plan,
        answers_dir=str(writer.directory),
        answers_fingerprint=writer.fingerprint,
        max_new_tokens=data.max_new_tokens,
        talk=TalkPlan.of(data, run.facts),
        prompts=todo,
        parallel=target.parallel,
    )
    budget = sum(row.asks for row in prompts if row.given is None) * data.max_new_tokens
    return run_jobs(
        split_job(job, data.workers),
        title="answering",
        budget=budget,
        log_dir=run.answers_dir,
        console=console,
    )


def _sizes(prompt: Rendered, data: DataSection) -> list[tuple[int, int]]:
    """Of each row of a prompt, if every turn has a row of its own: most tokens, most of them generated."""
    if prompt.given is not None:
        return [(len(prompt.token_ids), sum(end - start for start, end in prompt.given.spans))]
    new = data.max_new_tokens
    later = (data.max_prompt_tokens + new, new)
    return [(len(prompt.token_ids) + new, new), *[later] * (prompt.asks - 1)]


def _unasked(prompts: list[Rendered], writer: AnswerWriter) -> dict[str, dict[str, int]]:
    """Turns that were not asked because an earlier answer ended their conversation, by set and reason."""
    unasked: dict[str, dict[str, int]] = {prompt.set: {} for prompt in prompts}
    several = sorted((prompt for prompt in prompts if prompt.asks > 1), key=lambda prompt: prompt.row)
    if not several:
        return unasked
    first = [prompt.row for prompt in several]
    missing = [prompt.asks for prompt in several]
    reasons = [""] * len(several)
    for row in writer.rows():
        place = bisect_right(first, row.row) - 1
        if place >= 0 and row.row < first[place] + several[place].asks:
            missing[place] -= len(row.spans)
            reasons[place] = row.stopped or reasons[place]
    for prompt, left, reason in zip(several, missing, reasons, strict=True):
        if 0 < left < prompt.asks:  # a server may have failed to answer a prompt at all
            label = f"later turns: {reason}"
            unasked[prompt.set][label] = unasked[prompt.set].get(label, 0) + left
    return unasked


def _seal_states(
    run: Run,
    plan: StatesPlan,
    parts: dict[str, object],
    batches: dict[int, list[Rendered]],
) -> None:
    """Finishes the states store, unless a batch was answered earlier without states: `extract` adds those."""
    writer = plan.writer()
    if writer.sealed_batches() == set(batches):
        writer.seal()
        # The answering pass is counted once, by prepare.
        seal(run.states_dir, parts, 0.0, "kept while answering")
