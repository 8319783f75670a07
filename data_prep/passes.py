"""A second pass of the target over stored rows: what is left of it, as a job, and its end.

For the stage in one process (extract.py) and for each process of a launcher (ranks.py).
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Any

from rich.console import Console

from data_prep.jobs import Job, StatesPlan
from data_prep.plan import check_disk, extract_parts, states_plan, target_folder
from peagle_train.files import fingerprint, remove_leftovers
from peagle_train.run import Run
from peagle_train.stages import StageResult, begin, finished, require, seal
from peagle_train.store import AnswerRow, AnswerStore
from peagle_train.store.source import open_stored


@dataclass(frozen=True)
class Pass:
    """A second pass that is to be made: what it writes, and the rows it still lacks, by batch."""

    parts: dict[str, Any]
    plan: StatesPlan
    todo: dict[int, list[AnswerRow]]
    started: float

    @property
    def tokens(self) -> int:
        return sum(len(row.token_ids) for rows in self.todo.values() for row in rows)


def begin_pass(run: Run, console: Console) -> StageResult | Pass:
    """Marks the folder as unfinished work; a result where nothing is left to do. Raises as `extract`."""
    prepared = require(run, "prepare")
    parts = extract_parts(run, prepared)
    if run.recipe.states.mode != "stored":
        return _made_while_training(run, parts, console)
    done = finished(run.states_dir, parts, console)
    if done is not None:
        rows = len(open_stored(run, fingerprint(parts), console))  # raises if a shard is missing or cut short
        if run.recipe.states.kept_while_answering:
            return replace(done, message=f"{run.states_dir}: {rows} rows, kept while answering")
        return done
    started = time.monotonic()
    plan = states_plan(run, parts)
    answers = AnswerStore(run.answers_dir, expected=prepared)
    begin(run.states_dir, parts, console)
    remove_leftovers(run.states_dir)
    sealed = plan.writer().sealed_batches()
    batches = dict(enumerate(answers.batches()))
    todo = {batch: rows for batch, rows in batches.items() if batch not in sealed}
    if sealed:
        console.print(f"{len(sealed)} of {len(batches)} batches are there already", highlight=False)
    if todo:
        sizes = [(len(row.token_ids), row.supervised) for rows in todo.values() for row in rows]
        check_disk(run.directory, sizes, plan, console)
    return Pass(parts, plan, todo, started)


def pass_of(run: Run, parts: dict[str, Any], batches: Collection[int]) -> Pass:
    """The pass that another process has begun, of which some batches are left."""
    answers = enumerate(AnswerStore(run.answers_dir).stream())
    todo = {batch: rows for batch, rows in answers if batch in batches}
    return Pass(parts, states_plan(run, parts), todo, time.monotonic())


def job_of(run: Run, ready: Pass, console: Console) -> Job:
    """All that is left to do, as one job."""
    target = run.recipe.target
    return Job(
        kind="extract",
        target=str(target_folder(run, console)),
        dtype=target.dtype,
        device=target.device,
        trust_remote_code=target.trust_remote_code,
        threads=1,
        states=ready.plan,
        answered=ready.todo,
        batch_tokens=run.recipe.states.batch_tokens,
        parallel=target.parallel,
    )


def seal_pass(run: Run, ready: Pass, rate: str, console: Console) -> StageResult:
    """Ends the store, all of whose batches are there."""
    ready.plan.writer().seal()
    rows = len(open_stored(run, ready.plan.fingerprint, console))
    seconds = time.monotonic() - ready.started
    return seal(run.states_dir, ready.parts, seconds, f"states of {rows} rows{rate}")


def _made_while_training(run: Run, parts: dict[str, Any], console: Console) -> StageResult:
    """Nothing is stored; the record says what the training's states will be made from."""
    done = finished(run.states_dir, parts, console)
    if done is not None:
        return done
    begin(run.states_dir, parts, console)
    return seal(run.states_dir, parts, 0.0, f"states.mode {run.recipe.states.mode}: made beside training")
