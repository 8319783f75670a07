"""What a run came to: summary.json for machines, a table for people.

    {"run", "recipe", "target", "seed", "steps", "k", "head", "weights_sha256", "serve",
     "sets":   {NAME: {"acceptance_length", "per_position", "num_drafts", "num_accepted", "prompts",
                       "tokens", "loop": {the same, "lossless", "near_ties"} or null}},
     "stages": {NAME: {"seconds", "skipped"}}, "seconds", "versions", "command"}

`seconds` of a skipped stage are those of the time when it was done.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from peagle_train.errors import CorruptError, PeagleError
from peagle_train.files import read_json, sha256_of, write_json
from peagle_train.run import FOLDERS, Run
from peagle_train.stages import StageResult, read_record
from peagle_train.versions import versions

RESULTS = "results.json"
_MEASURES = ("acceptance_length", "per_position", "num_drafts", "num_accepted")


def summarise(run: Run, results: Mapping[str, StageResult], serve: str) -> dict[str, Any]:
    """Gathers the summary from the folders of a run and writes summary.json.

    Args:
        run: whose evaluation has finished.
        results: of the stages that were called just now; the others count as skipped.
        serve: the command that serves the head.

    Raises:
        PeagleError: the evaluation's results are missing.
        CorruptError: they lack a figure.
    """
    from peagle_train.training.ending import steps_taken  # here, because it needs torch

    stages = {}
    for name in FOLDERS:
        record = read_record(run.stage_dir(name))
        seconds = results[name].seconds if name in results else (record.seconds if record else None)
        if seconds is None:
            raise PeagleError(
                f"{run.stage_dir(name)}: {name} has not finished; run `{run.command_for('run')}`"
            )
        stages[name] = {"seconds": round(seconds, 2), "skipped": name not in results or results[name].skipped}
    recipe = run.recipe
    summary = {
        "run": recipe.name,
        "recipe": run.source,
        "target": recipe.target.model,
        "seed": recipe.seed,
        "steps": steps_taken(run.training_dir, recipe.train),
        "k": recipe.evaluate.k,
        "head": str(run.head_dir),
        "weights_sha256": sha256_of(run.head_dir / "model.safetensors"),
        "serve": serve,
        "sets": read_results(run.evaluation_dir / RESULTS, run.command_for("evaluate")),
        "stages": stages,
        "seconds": round(sum(stage["seconds"] for stage in stages.values()), 2),
        "versions": versions(),
        "command": shlex.join(run.command),
    }
    write_json(run.summary_path, summary)
    return summary


def print_summary(summary: Mapping[str, Any], console: Console) -> None:
    """Acceptance per prompt set, seconds per stage, the head's place, and how to serve it."""
    print_acceptance(summary["sets"], summary["k"], console)
    console.print()
    times = Table(title="Seconds per stage")
    times.add_column("stage")
    times.add_column("seconds", justify="right")
    times.add_column("")
    for name, stage in summary["stages"].items():
        times.add_row(
            name, f"{stage['seconds']:,.1f}", "skipped: nothing was left to do" if stage["skipped"] else ""
        )
    earlier = any(stage["skipped"] and stage["seconds"] >= 0.05 for stage in summary["stages"].values())
    times.add_row("all, skipped ones too" if earlier else "all", f"{summary['seconds']:,.1f}", "")
    console.print(times)
    for text in (f"Head:  {summary['head']}", "Serve it with:", f"  {summary['serve']}"):
        console.print(text, markup=False, highlight=False, soft_wrap=True)


def print_acceptance(sets: Mapping[str, Any], k: int, console: Console) -> None:
    """The table of acceptance by held-out set, and what the speculative loop showed."""
    table = Table(title=f"Acceptance on held-out prompts, K = {k}, greedy")
    table.add_column("set", no_wrap=True)
    for head in ("prompts", "drafts", "length", f"accepted at 1..{k}", "loop (n)"):
        table.add_column(head, justify="right", no_wrap=True)
    for name, figures in sets.items():
        table.add_row(
            name,
            f"{figures['prompts']:,}",
            f"{figures['num_drafts']:,}",
            f"{figures['acceptance_length']:.2f}",
            " ".join(f"{share:.2f}" for share in figures["per_position"]),
            _loop_figure(figures["loop"]),
        )
    console.print()
    console.print(table)
    for name, figures in sets.items():
        console.print(f"{name}: {_loop_words(figures['loop'])}", markup=False, highlight=False)


def _loop_figure(loop: Mapping[str, Any] | None) -> str:
    """The loop's acceptance length and on how many prompts: far fewer than the column beside it."""
    return f"{loop['acceptance_length']:.2f} ({loop['prompts']})" if loop else "–"


def _loop_words(loop: Mapping[str, Any] | None) -> str:
    """What the speculative loop showed, in a sentence."""
    if loop is None:
        return "no prompt went through the speculative loop"
    verdict = "equal" if loop["lossless"] else "NOT EQUAL"
    return (
        f"{loop['prompts']} prompts through the speculative loop, output {verdict} to greedy decoding, "
        f"{loop['near_ties']} near ties"
    )


def read_results(path: Path, remake: str = "peagle evaluate") -> dict[str, Any]:
    """The figures of an evaluation by held-out set: the offline ones, and under `loop` the loop's or None.

    Raises PeagleError if there is no such file, CorruptError if it lacks a figure; `remake` is the command
    that makes it.
    """
    if not path.is_file():
        raise PeagleError(f"{path}: found no results; run `{remake}`")
    sets = {}
    for name, measured in read_json(path)["sets"].items():
        offline, loop = measured.get("offline") or {}, measured.get("loop")
        if loop is not None and loop.get("prompts") == 0:
            loop = None  # no prompt went through it, so it proves nothing
        missing = [key for key in (*_MEASURES, "prompts", "tokens") if key not in offline]
        if loop is not None:
            missing += [f"loop.{key}" for key in (*_MEASURES, "lossless", "near_ties") if key not in loop]
        if missing:
            raise CorruptError(f"{path}: set {name} lacks {', '.join(missing)}; run `{remake}` anew")
        sets[name] = {**offline, "loop": loop}
    return sets
