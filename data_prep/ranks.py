"""The stage `extract` under a launcher: every process makes the states of its share.

    accelerate launch --config_file recipes/accelerate/eight_gpus.yaml -m data_prep.extract RECIPE [KEY=VALUE]

    rank 0     begins the stage ── tells which batches are left ── its share ──┐
    rank 1..                       hears it                        its share ──┴─ all done ── rank 0 seals

Shares are balanced by tokens. A batch is whole or not there, so after a kill of any process the same launch,
or one with another number of processes, makes what is missing. A process that fails ends, and its launcher
ends the others.
"""

from __future__ import annotations

import datetime
import os
import sys
from collections.abc import Mapping
from dataclasses import replace

import torch.distributed
from rich.console import Console

from data_prep.passes import Pass, begin_pass, job_of, pass_of, seal_pass
from data_prep.workers import gpus_of, run_jobs
from peagle_train.errors import PeagleError
from peagle_train.run import Run
from peagle_train.stages import StageResult

PATIENCE = datetime.timedelta(days=30)
"""A process that is done waits for the slowest: there is no telling how long."""


def main(arguments: list[str]) -> int:
    """Extracts; every process of the launcher calls this. Returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: accelerate launch -m data_prep.extract RECIPE [key=value ...]")
        print("RECIPE is a YAML file; its prompts must have been answered: peagle prepare RECIPE")
        return 0 if arguments else 2
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    console = Console(quiet=rank != 0)
    try:
        if world > 1:
            torch.distributed.init_process_group("gloo", timeout=PATIENCE)
        with Run.open(arguments[0], arguments[1:], write=rank == 0) as run:
            result = extract_share(run, rank, world, console)
            if result is not None:
                console.print(f"extract: {result.message}", markup=False, highlight=False)
                console.print(f"Next: {run.command_for('train')}", markup=False, highlight=False)
    except PeagleError as error:
        print(f"process {rank}: {error}", file=sys.stderr)
        return error.exit_code
    if world > 1:
        torch.distributed.destroy_process_group()
    return 0


def extract_share(run: Run, rank: int, world: int, console: Console) -> StageResult | None:
    """Makes this process's share; in rank 0 returns the result of the stage. Raises as `extract`."""
    if run.recipe.states.backend == "vllm":
        raise PeagleError(
            "states.backend: vllm starts its own processes, one for each GPU; run `peagle extract` without a "
            "launcher, or write states.backend: hf"
        )
    if run.recipe.target.parallel != "none" and world > 1:
        raise PeagleError(
            f"target.parallel: {run.recipe.target.parallel} takes all GPUs of a machine for one target; "
            "expected one process: run `peagle extract`"
        )
    ready = begin_pass(run, console) if rank == 0 else None
    told = [(ready.parts, list(ready.todo)) if isinstance(ready, Pass) else None]
    if world > 1:
        torch.distributed.broadcast_object_list(told)
    if told[0] is None:
        return ready if isinstance(ready, StageResult) else None
    if not isinstance(ready, Pass):
        ready = pass_of(run, *told[0])
    if rank == 0:
        console.print(f"extracting on {world} processes", highlight=False)
    tokens = {batch: sum(len(row.token_ids) for row in rows) for batch, rows in ready.todo.items()}
    mine = shares(tokens, world)[rank]
    if mine:
        whole = job_of(run, ready, console)
        gpus = gpus_of(run.recipe.target.device)
        job = replace(
            whole,
            device=f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}" if gpus else "cpu",
            threads=None if gpus else 1,
            answered={batch: ready.todo[batch] for batch in mine},
        )
        budget = sum(len(row.token_ids) for rows in job.answered.values() for row in rows)
        run_jobs(
            [job], title="extracting", budget=budget, log_dir=run.states_dir, console=console, first=rank
        )
    if world > 1:
        torch.distributed.barrier()
    return seal_pass(run, ready, f" on {world} processes", console) if rank == 0 else None


def shares(tokens: Mapping[int, int], world: int) -> list[list[int]]:
    """Batches by process, of about equal numbers of tokens."""
    found: list[list[int]] = [[] for _ in range(world)]
    sums = [0] * world
    for batch in sorted(tokens, key=lambda batch: (-tokens[batch], batch)):
        rank = min(range(world), key=lambda rank: (sums[rank], rank))
        found[rank].append(batch)
        sums[rank] += tokens[batch]
    return [sorted(mine) for mine in found]
