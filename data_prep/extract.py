"""The stage `extract`: hidden states of every answered row.

Usually `prepare` kept them while answering, and nothing is left to do. Otherwise (the states were not
kept, or other aux layers or another dtype are asked for now) the target reads the stored rows once more,
teacher-forced; the answers themselves are never made again.

On several machines: `accelerate launch -m data_prep.extract RECIPE`, see ranks.py.
"""

from __future__ import annotations

import sys

from rich.console import Console

from data_prep.passes import begin_pass, job_of, seal_pass
from data_prep.vllm_states.jobs import vllm_jobs
from data_prep.workers import run_jobs, split_job
from peagle_train.run import Run
from peagle_train.stages import StageResult


def extract(run: Run, console: Console) -> StageResult:
    """Makes the states store of a run.

    Raises PeagleError: answers missing, stale or damaged, the disk, a worker; see the message.
    """
    ready = begin_pass(run, console)
    if isinstance(ready, StageResult):
        return ready
    rate = ""
    if ready.todo:
        job = job_of(run, ready, console)
        on_vllm = run.recipe.states.backend == "vllm"
        work = run_jobs(
            vllm_jobs(job, run) if on_vllm else split_job(job, run.recipe.data.workers),
            title="extracting",
            budget=ready.tokens,
            log_dir=run.states_dir,
            console=console,
        )
        rate = f" ({work.rate})"
    return seal_pass(run, ready, rate, console)


if __name__ == "__main__":
    from data_prep.ranks import main

    sys.exit(main(sys.argv[1:]))
