"""Runs jobs in worker processes, shows their progress, and takes them all down when one fails.

On a CPU several single-thread processes answer about twice as fast as one process with as many threads.
Batch i goes to worker i mod W, so each worker knows its share from the start and nothing is queued.
Workers are programs of their own (`python -m data_prep.worker`): a notebook can start them as well as
the command line, and a worker that dies takes nothing with it but its unsealed batch.
"""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

import data_prep
from data_prep.jobs import Job
from peagle_train.errors import PeagleError

_LAST_LINES = 12


@dataclass
class Work:
    """What all workers together did."""

    rows: int = 0
    tokens: int = 0
    seconds: float = 0.0  # wall
    cpu_seconds: float = 0.0  # of the batches, all workers, loading not counted
    workers: int = 0

    @property
    def rate(self) -> str:
        """Tokens per second, for people."""
        return f"{self.tokens / max(self.seconds, 1e-9):,.0f} tokens/s on {self.workers} workers"


def split_job(job: Job, workers: int | None) -> list[Job]:
    """One job a worker. workers: left out, one per GPU, or per core on a CPU.

    A target that is spread over the GPUs (target.parallel) has one worker for all of them.
    """
    gpus = gpus_of(job.device)
    if gpus:
        devices = ["cuda"] if job.parallel == "layers" else [f"cuda:{number}" for number in gpus]
    else:
        devices = ["cpu"] * usable_cores()
    batches = sorted(job.prompts or job.answered)
    count = min(workers if workers is not None else len(devices), len(batches))
    return [
        replace(
            job,
            device=devices[worker % len(devices)],
            threads=None if gpus else 1,
            prompts={batch: job.prompts[batch] for batch in batches[worker::count] if batch in job.prompts},
            answered={
                batch: job.answered[batch] for batch in batches[worker::count] if batch in job.answered
            },
        )
        for worker in range(count)
    ]


def gpus_of(device: str) -> list[int]:
    """The GPUs that target.device stands for; none on a CPU."""
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return []
    return [int(number)] if number else list(range(torch.cuda.device_count()))


def usable_cores() -> int:
    """Cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def run_jobs(
    jobs: Sequence[Job], *, title: str, budget: int, log_dir: Path, console: Console, first: int = 0
) -> Work:
    """Runs one worker a job until all batches are sealed.

    first: number of the first worker, where others of the same folder run elsewhere.
    budget: tokens the bar counts to (an upper bound: a batch that ends early jumps to its share).
    log_dir: receives worker-N.log.
    Raises PeagleError when a worker reports a fault or dies; the others are ended first.
    """
    total_rows = sum(len(rows) for job in jobs for rows in (job.prompts or job.answered).values())
    work, started = Work(workers=len(jobs)), time.monotonic()
    columns = (
        TextColumn(title),
        BarColumn(),
        TextColumn("{task.fields[rows]}/{task.fields[all]} rows"),
        TextColumn("{task.fields[rate]}"),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    crew: list[_Worker] = []
    try:
        for number, job in enumerate(jobs, start=first):
            crew.append(_Worker(number, job, log_dir))
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(title, total=budget, rows=0, all=total_rows, rate="loading the target")
            share, live = budget / max(total_rows, 1), 0
            for worker, report in _reports(crew):
                if "fault" in report:
                    raise PeagleError(report["fault"])
                if "begin" in report:
                    worker.batch = report["begin"]
                live += report["tokens"] if "done" not in report and "tokens" in report else 0
                if "done" in report:
                    work.rows += report["rows"]
                    work.tokens += report["tokens"]
                    work.cpu_seconds += report["cpu"]
                worker.count(report)
                done = work.rows * share + sum(other.live for other in crew)
                rate = (
                    f"{live / (time.monotonic() - started):,.0f} tokens/s" if live else "loading the target"
                )
                progress.update(task, completed=min(done, budget), rows=work.rows, rate=rate)
    finally:
        for worker in crew:
            worker.end()
    work.seconds = time.monotonic() - started
    return work


class _Worker:
    """One worker process and the thread that reads its reports."""

    def __init__(self, number: int, job: Job, log_dir: Path):
        self.number = number
        self.batch: int | None = None
        self.live = 0  # tokens of the batch at work
        self.log = log_dir / f"worker-{number}.log"
        environment = dict(os.environ, OMP_WAIT_POLICY="PASSIVE", TOKENIZERS_PARALLELISM="false")
        if job.threads is not None:
            environment.update(OMP_NUM_THREADS=str(job.threads), MKL_NUM_THREADS=str(job.threads))
        root = str(Path(data_prep.__file__).parent.parent)
        environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, os.environ.get("PYTHONPATH")]))
        with self.log.open("wb") as log:
            self.process = subprocess.Popen(
                [sys.executable, "-m", "data_prep.worker"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=environment,
            )
        self._job = job.to_json().encode()

    def read(self, reports: queue.Queue[tuple[_Worker, dict[str, Any] | None]]) -> None:
        """Hands over the job, then passes reports on until the worker ends; the last one is None."""
        assert self.process.stdin is not None and self.process.stdout is not None
        try:
            with self.process.stdin as stream:
                stream.write(self._job)
        except BrokenPipeError:
            pass  # it died before it read its job: its exit status tells
        for line in self.process.stdout:
            reports.put((self, json.loads(line)))
        reports.put((self, None))

    def count(self, report: dict[str, Any]) -> None:
        self.live = 0 if "done" in report else self.live + report.get("tokens", 0)

    def check_end(self) -> None:
        """Raises PeagleError unless the worker ended well."""
        status = self.process.wait()
        if status != 0:
            where = f"in batch {self.batch}" if self.batch is not None else "before its first batch"
            how = f"by signal {-status}" if status < 0 else f"with status {status}"
            lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
            shown = "\n".join(f"  | {line}" for line in lines[-_LAST_LINES:]) or "  | (it wrote nothing)"
            hint = " (often too little memory: try fewer data.workers)" if status == -9 else ""
            raise PeagleError(
                f"worker {self.number} ended {how} {where}{hint}; finished batches are kept, and the same "
                f"command goes on from them. Its last lines ({self.log}):\n{shown}"
            )

    def end(self) -> None:
        """Ends the process if it still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(timeout=5)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def _reports(crew: Sequence[_Worker]) -> Any:
    """Reports of all workers as they come, until the last worker has ended well."""
    reports: queue.Queue[tuple[_Worker, dict[str, Any] | None]] = queue.Queue()
    for worker in crew:
        threading.Thread(target=worker.read, args=(reports,), daemon=True).start()
    running = len(crew)
    while running:
        worker, report = reports.get()
        if report is None:
            worker.check_end()
            running -= 1
        else:
            yield worker, report
