"""P-EAGLE against the EAGLE-3 baseline on the same states: at equal data, and at equal CPU-seconds.

    .venv/bin/python scripts/compare_methods.py                     SmolLM2, seeds 0 and 1, in runs/compare
    .venv/bin/python scripts/compare_methods.py --seeds 0 --steps 100

Three trainings a seed:

    peagle                     the recipe's steps
    eagle3, equal data         the same number of steps on the same rows
    eagle3, equal CPU          as many steps as cost what peagle's training cost

CPU-seconds are those of the whole training stage on one thread (threads that wait for each other would count
as work), validation included; they are measured, not trusted: the table shows both. Acceptance says what a
draft is worth; what it costs to make is another matter: peagle's K tokens take one pass of the head, eagle3's
take K.

The result stands in OUTPUT/compare.json; what is finished is not done again.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from peagle_train import Run
from peagle_train.files import read_json, write_json
from peagle_train.pipeline import run_stage

SHARED = ("answers", "states")
PROBE_STEPS = (20, 60)


def main() -> None:
    options = _options()
    torch.set_num_threads(1)
    console = Console()
    output = Path(options.output)
    base = _overrides(options, "data", 0, [])
    with Run.open(options.peagle, base) as run:
        for stage in ("prepare", "extract"):
            run_stage(run, stage, console)
    rows = []
    for seed in options.seeds:
        ours = _train(options, "peagle", seed, options.steps, console)
        rows.append({"what": "peagle", **ours})
        equal_data = _train(options, "eagle3", seed, ours["steps"], console)
        rows.append({"what": "eagle3, equal data", **equal_data})
        steps = _affordable_steps(options, seed, ours["cpu_seconds"], console)
        rows.append({"what": "eagle3, equal CPU", **_train(options, "eagle3", seed, steps, console)})
        write_json(output / "compare.json", {"k": rows[0]["k"], "rows": rows})
    print(_table(rows))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--peagle", default="smollm2", help="recipe of the P-EAGLE head")
    parser.add_argument("--eagle3", default="smollm2-eagle3", help="recipe of the baseline, on the same data")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="one training of each method")
    parser.add_argument("--steps", type=int, help="steps of both at equal data; left out: the recipe's")
    parser.add_argument("--output", default="runs/compare", help="where the runs are kept")
    return parser.parse_args()


def _overrides(options: argparse.Namespace, name: str, seed: int, more: list[str]) -> list[str]:
    # The loop would count the same acceptance on a few prompts once more.
    fixed = [f"output={options.output}", f"name={name}", f"seed={seed}", "evaluate.loop_prompts=0"]
    return [*fixed, *more]


def _train(
    options: argparse.Namespace, method: str, seed: int, steps: int | None, console: Console
) -> dict[str, Any]:
    """One training on the shared states, exported and measured; read back if it was done before."""
    name = f"{method}-seed{seed}" + (f"-steps{steps}" if steps else "")
    more = [f"train.steps={steps}"] if steps else []
    with _on_shared_states(options, method, name, seed, more) as run:
        cost = _trained(run, console)
        for stage in ("export", "evaluate"):
            run_stage(run, stage, console)
        sets = read_json(run.evaluation_dir / "results.json")["sets"]
        return {
            "method": method,
            "seed": seed,
            "steps": run.recipe.train.steps,
            "k": run.recipe.evaluate.k,
            "cpu_seconds": round(cost, 1),
            "acceptance": {name: figures["offline"]["acceptance_length"] for name, figures in sets.items()},
            "per_position": {name: figures["offline"]["per_position"] for name, figures in sets.items()},
        }


def _affordable_steps(options: argparse.Namespace, seed: int, seconds: float, console: Console) -> int:
    """How many eagle3 steps cost `seconds`: a line through the cost of two short trainings."""
    few, many = PROBE_STEPS
    cost = {}
    for steps in PROBE_STEPS:
        more = [f"train.steps={steps}", "train.warmup_steps=0"]
        with _on_shared_states(options, "eagle3", f"probe-seed{seed}-steps{steps}", seed, more) as run:
            cost[steps] = _trained(run, console)
    per_step = (cost[many] - cost[few]) / (many - few)
    return max(1, round((seconds - (cost[few] - few * per_step)) / per_step))


def _on_shared_states(options: argparse.Namespace, method: str, name: str, seed: int, more: list[str]) -> Run:
    """A run whose answers and states are those of the data run."""
    run = Run.open(getattr(options, method), _overrides(options, name, seed, more))
    for shared in SHARED:
        if not (run.directory / shared).exists():
            (run.directory / shared).symlink_to(Path("..") / "data" / shared)
    return run


def _trained(run: Run, console: Console) -> float:
    """Trains, and returns what it cost in CPU-seconds; of a training done before, what it cost then."""
    record = run.directory / "cost.json"
    console.rule(run.recipe.name)
    before = time.process_time()
    if not run_stage(run, "train", console).skipped:
        write_json(record, {"cpu_seconds": time.process_time() - before})
    return float(read_json(record)["cpu_seconds"])


def _table(rows: list[dict[str, Any]]) -> str:
    """Markdown, one line a training."""
    sets = list(rows[0]["acceptance"])
    head = ["head", "seed", "steps", "CPU-seconds", *(f"{name}, K = {rows[0]['k']}" for name in sets)]
    lines = ["| " + " | ".join(head) + " |", "|---" + "|---:" * (len(head) - 1) + "|"]
    for row in rows:
        values = [row["what"], str(row["seed"]), f"{row['steps']:,}", f"{row['cpu_seconds']:.0f}"]
        values += [f"{row['acceptance'][name]:.3f}" for name in sets]
        lines.append("| " + " | ".join(values) + " |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
