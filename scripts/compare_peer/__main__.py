"""The command: a grid of trainings on each side, their acceptance, the ratio. See the package's docstring."""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch import Tensor

import scripts.compare_peer as package
from peagle_train import PeagleError, Run
from peagle_train.files import read_json, write_json
from peagle_train.pipeline import run_stage
from peagle_train.stages import require
from peagle_train.store.documents import slot_counts, trainable_rows
from peagle_train.store.states import StateStore
from peagle_train.target.adapter import Target
from peagle_train.target.source import obtain
from peagle_train.training.start import make_start
from scripts.compare_peer.learn import RESULT, Job
from scripts.compare_peer.measure import read_learned
from scripts.learning.acceptance import counts_by_prompt, interval, length
from scripts.learning.process import SURROUNDINGS, require_peer

ASKED = 1.05
"""Our acceptance length over the peer's."""
VALIDATION = "validation"


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    console = Console(width=max(100, Console().width))  # the tables are that wide
    try:
        require_peer(options.peer_python, "compare-peer")
        with Run.open(options.recipe, options.overrides) as run:
            for stage in ("prepare", "extract"):
                run_stage(run, stage, console)
            store = StateStore(run.states_dir, expected=require(run, "extract"))
            jobs = _jobs(options, run, store, console)
            learned = []
            for job in jobs:
                done = _learned(job, options.peer_python, console)
                head = read_learned(job, run.facts, store)
                sets = (VALIDATION, *run.recipe.data.heldout)
                counts = {name: counts_by_prompt(head, store, name, run.recipe.evaluate.k) for name in sets}
                learned.append((job, done, counts))
    except PeagleError as error:
        sys.exit(f"error: {error}")
    _print_trainings(learned, options.seconds, console)
    best = {side: _best(side, learned) for side in ("ours", "peer")}
    _print_best(best, console)
    rows = [
        {**done, "counts": {name: pairs.tolist() for name, pairs in counts.items()}}
        for _, done, counts in learned
    ]
    write_json(options.output / "compare_peer.json", {"k": run.recipe.evaluate.k, "trainings": rows})
    console.print(f"written: {options.output / 'compare_peer.json'}", highlight=False)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.compare_peer",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--recipe", default="smollm2", help="whose states are used, and how ours is trained")
    parser.add_argument("overrides", nargs="*", help="of the recipe, as a.b=c")
    parser.add_argument("--seconds", type=float, default=120.0, help="CPU-seconds of each training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="one training of each setting")
    parser.add_argument(
        "--rates", type=float, nargs="+", default=[5e-4, 1e-3, 2e-3], help="learning rates of ours"
    )
    parser.add_argument(
        "--peer-rates", type=float, nargs="+", default=[3e-4, 1e-3, 3e-3], help="learning rates of the peer"
    )
    parser.add_argument(
        "--peer-optimizers",
        nargs="+",
        choices=["adamw", "muon"],
        default=["adamw"],
        help="muon is the peer's default",
    )
    parser.add_argument(
        "--peer-embeddings",
        nargs="+",
        choices=["trained", "frozen"],
        default=["trained"],
        help="trained is the peer's default; frozen makes its steps cheaper",
    )
    parser.add_argument(
        "--peer-python", default=".venv-peer/bin/python", help="python with speculators 0.9.0"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/compare_peer"), help="where the runs are kept"
    )
    return parser.parse_args()


def _jobs(options: argparse.Namespace, run: Run, store: StateStore, console: Console) -> list[Job]:
    """Every training of the grid. Writes the draft vocabulary, which both sides share."""
    recipe, rows = run.recipe, trainable_rows(store, "train")
    folder = obtain(recipe.target, console)
    target = Target.load(folder, dtype=recipe.target.dtype, device="cpu")
    start = make_start(recipe, target, store, rows, options.output, console)
    if start.head.config.mask_token_id is None or recipe.train.accumulate != 1:
        raise PeagleError(
            f"{options.recipe}: method {recipe.method}, train.accumulate {recipe.train.accumulate}; "
            "expected peagle and 1: the peer trains one batch a step"
        )
    section = recipe.train
    grids = [("ours", "adamw", recipe.head.embeddings, options.rates)]
    grids += [
        ("peer", optimizer, embeddings, options.peer_rates)
        for optimizer in options.peer_optimizers
        for embeddings in options.peer_embeddings
    ]
    return [
        Job(
            side=side,
            recipe=options.recipe,
            overrides=list(options.overrides),
            states=str(run.states_dir),
            target=str(folder),
            vocabulary=str(options.output / "draft_vocabulary.safetensors"),
            directory=str(options.output / f"{side}-{optimizer}-{embeddings}-{rate:g}-seed{seed}"),
            rows=rows,
            lengths=slot_counts(store, rows),
            probe=trainable_rows(store, VALIDATION)[0],
            seed=seed,
            seconds=options.seconds,
            rate=rate,
            optimizer=optimizer,
            embeddings=embeddings,
            warmup=section.warmup_steps / section.steps,
            decay=section.decay,
            batch_tokens=section.batch_tokens,
            clip_norm=section.clip_norm,
            positions=section.positions,
            layers=start.head.config.num_layers,
            aux_layers=list(start.head.config.aux_layers),
            mask_token_id=start.head.config.mask_token_id,
        )
        for side, optimizer, embeddings, rates in grids
        for rate in rates
        for seed in options.seeds
    ]


def _learned(job: Job, peer_python: str, console: Console) -> dict[str, Any]:
    """Runs a job in a process of its own, unless its result is there."""
    directory = Path(job.directory)
    result = directory / RESULT
    if not (result.is_file() and read_json(result)["job"] == asdict(job)):
        result.unlink(missing_ok=True)
        console.print(f"{directory.name}: {job.seconds:g} CPU-seconds", highlight=False)
        write_json(directory / "job.json", asdict(job))
        python = sys.executable if job.side == "ours" else peer_python
        command = [python, "-m", "scripts.compare_peer.learn", str(directory / "job.json")]
        with (directory / "log.txt").open("w") as log:
            ended = subprocess.run(command, env={**os.environ, **SURROUNDINGS}, stdout=log, stderr=log)
        if ended.returncode:
            raise PeagleError(
                f"{directory.name} ended with status {ended.returncode}; see {directory / 'log.txt'}"
            )
    return dict(json.loads(result.read_text(encoding="utf-8")))


Learned = tuple[Job, dict[str, Any], dict[str, Tensor]]


def _best(side: str, learned: list[Learned]) -> dict[str, Any]:
    """What validation likes best of a side's grid, over all seeds, and its counts by set."""
    grid: dict[tuple[str, str, float], list[dict[str, Tensor]]] = {}
    for job, _, counts in learned:
        if job.side == side:
            grid.setdefault((job.optimizer, job.embeddings, job.rate), []).append(counts)
    # One prompt's counts are those of all seeds together, so that prompts stay the unit that is resampled.
    pooled = {key: {name: sum(c[name] for c in runs) for name in runs[0]} for key, runs in grid.items()}
    best = max(pooled, key=lambda key: length(pooled[key][VALIDATION]))
    return {"what": "{}, embeddings {}, learning rate {:g}".format(*best), "counts": pooled[best]}


def _print_trainings(learned: list[Learned], seconds: float, console: Console) -> None:
    table = Table(title=f"{seconds:g} CPU-seconds each: acceptance length, 95 % over prompts")
    names = list(learned[0][2])
    for column in ("side", "optimizer\ntables", "rate", "seed", "trained\n(M)", "steps", *names):
        kind = "left" if column.startswith(("side", "optimizer")) else "right"
        table.add_column(column, justify=kind)
    for job, done, counts in learned:
        figures = (f"{job.rate:g}", str(job.seed), f"{done['trained'] / 1e6:.1f}", f"{done['steps']:,}")
        table.add_row(
            job.side,
            f"{job.optimizer}\n{job.embeddings}",
            *figures,
            *(_with_interval(counts[name]) for name in names),
        )
    console.print(table)


def _print_best(best: dict[str, dict[str, Any]], console: Console) -> None:
    table = Table(title="Each side as validation chose it")
    for column in ("set", "prompts", "ours", "peer", "ours / peer", "asked"):
        table.add_column(column, justify="left" if column == "set" else "right")
    for name, ours in best["ours"]["counts"].items():
        if name == VALIDATION:
            continue  # it chose
        peer = best["peer"]["counts"][name]
        low, high = interval(ours, peer)
        ratio = f"{length(ours) / length(peer):.3f}\n{low:.3f}–{high:.3f}"
        figures = (str(len(ours)), _with_interval(ours), _with_interval(peer), ratio, f"≥ {ASKED}")
        table.add_row(name, *figures)
    console.print(table)
    for side, chosen in best.items():
        console.print(f"{side}: {chosen['what']}", highlight=False)


def _with_interval(counts: Tensor) -> str:
    low, high = interval(counts)
    return f"{length(counts):.3f}\n{low:.2f}–{high:.2f}"


if __name__ == "__main__":
    main()
