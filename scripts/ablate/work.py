"""Trains what is not there yet, several at a time, and says how long it will take."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from peagle_train.errors import PeagleError
from peagle_train.files import write_json
from scripts.ablate.job import JOB, LOG, Job, counts_of
from scripts.learning.acceptance import length
from scripts.learning.process import SURROUNDINGS

AROUND = 30.0
"""Seconds that start and measurement take beside a training, before one has been timed."""


def run_process(job: Job) -> None:
    """Trains in a process of its own. Raises PeagleError, naming the log, if that does not end well."""
    directory = Path(job.directory)
    write_json(directory / JOB, asdict(job))
    command = [sys.executable, "-m", "scripts.ablate.job", str(directory / JOB)]
    with (directory / LOG).open("w") as log:
        ended = subprocess.run(command, env={**os.environ, **SURROUNDINGS}, stdout=log, stderr=log)
    if ended.returncode:
        raise PeagleError(f"{directory.name} ended with status {ended.returncode}; see {directory / LOG}")


def work(
    jobs: Sequence[Job],
    workers: int,
    console: Console,
    run: Callable[[Job], None] = run_process,
) -> list[dict[str, Any]]:
    """The results of all jobs in their order; those that are there are read.

    Raises PeagleError for the first job that fails: none is begun after it, those at work are waited for, and
    what has finished is kept.
    """
    waiting = [job for job in jobs if job.done() is None]
    start = time.monotonic()
    pool = ThreadPoolExecutor(max_workers=workers)
    futures = {pool.submit(run, job): job for job in waiting}
    try:
        for finished, future in enumerate(as_completed(futures), start=1):
            future.result()
            left = len(waiting) - finished
            each = (time.monotonic() - start) / finished
            text = f"[{len(jobs) - left}/{len(jobs)}] {_told(futures[future])}"
            console.print(f"{text}; about {in_words(each * left)} left", markup=False, highlight=False)
    finally:
        pool.shutdown(cancel_futures=True)
    return [_result(job) for job in jobs]


def seconds_left(jobs: Sequence[Job], workers: int) -> float:
    """What the jobs that are not done will take, from those that are."""
    done = [result for job in jobs if (result := job.done()) is not None]
    waiting = [job for job in jobs if job.done() is None]
    around = [result["wall_seconds"] - result["seconds"] for result in done]
    beside = sum(around) / len(around) if around else AROUND
    return sum(job.seconds + beside for job in waiting) / max(1, min(workers, len(waiting)))


def in_words(seconds: float) -> str:
    """`1 h 05 min`, `12 min`, `40 s`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def _told(job: Job) -> str:
    result = _result(job)
    return f"{job.name}, seed {job.seed}: {length(counts_of(result)):.3f} after {result['steps']:,} steps"


def _result(job: Job) -> dict[str, Any]:
    result = job.done()
    if result is None:
        raise PeagleError(f"{job.directory}: found no result of this job; expected one after it has ended")
    return result
