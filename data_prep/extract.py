"""The stage `extract`: hidden states of every answered row.

Usually `prepare` kept them while answering, and nothing is left to do. Otherwise (the states were not
kept, or other aux layers or another dtype are asked for now) the target reads the stored rows once more,
teacher-forced; the answers themselves are never made again.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

from rich.console import Console

from data_prep.jobs import Job
from data_prep.plan import check_disk, extract_parts, states_plan, target_folder
from data_prep.vllm_states.jobs import vllm_jobs
from data_prep.workers import run_jobs, split_job
from peagle_train.files import fingerprint, remove_leftovers
from peagle_train.run import Run
from peagle_train.stages import StageResult, begin, finished, require, seal
from peagle_train.store import AnswerStore
from peagle_train.store.source import open_stored


def extract(run: Run, console: Console) -> StageResult:
    """Makes the states store of a run.

    Raises PeagleError: answers missing, stale or damaged, the disk, a worker; see the message.
    """
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
    writer = plan.writer()
    answers = AnswerStore(run.answers_dir, expected=prepared)
    begin(run.states_dir, parts, console)
    remove_leftovers(run.states_dir)
    sealed = writer.sealed_batches()
    batches = dict(enumerate(answers.batches()))
    todo = {batch: rows for batch, rows in batches.items() if batch not in sealed}
    if sealed:
        console.print(f"{len(sealed)} of {len(batches)} batches are there already", highlight=False)
    rate = ""
    if todo:
        sizes = [(len(row.token_ids), row.supervised) for rows in todo.values() for row in rows]
        check_disk(run.directory, sizes, plan, console)
        target = run.recipe.target
        job = Job(
            kind="extract",
            target=str(target_folder(run, console)),
            dtype=target.dtype,
            device=target.device,
            trust_remote_code=target.trust_remote_code,
            threads=1,
            states=plan,
            answered=todo,
        )
        on_vllm = run.recipe.states.backend == "vllm"
        work = run_jobs(
            vllm_jobs(job, run) if on_vllm else split_job(job, run.recipe.data.workers),
            title="extracting",
            budget=sum(tokens for tokens, _ in sizes),
            log_dir=run.states_dir,
            console=console,
        )
        rate = f" ({work.rate})"
    writer.seal()
    rows = len(open_stored(run, plan.fingerprint, console))
    return seal(run.states_dir, parts, time.monotonic() - started, f"states of {rows} rows{rate}")


def _made_while_training(run: Run, parts: dict[str, Any], console: Console) -> StageResult:
    """Nothing is stored; the record says what the training's states will be made from."""
    done = finished(run.states_dir, parts, console)
    if done is not None:
        return done
    begin(run.states_dir, parts, console)
    return seal(run.states_dir, parts, 0.0, f"states.mode {run.recipe.states.mode}: made beside training")
