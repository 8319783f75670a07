"""The command: plan, trainings, table, combination, and the second set once. See the package's docstring."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor

import scripts.ablate as package
from peagle_train import PeagleError, Run
from peagle_train.files import fingerprint, read_json, write_json
from peagle_train.head.io import load_head
from peagle_train.pipeline import run_stage
from scripts.ablate import report
from scripts.ablate.bench import Bench
from scripts.ablate.choose import combined, measured, winners
from scripts.ablate.grid import BASE, Variant, only, variants
from scripts.ablate.job import Job, counts_of
from scripts.ablate.work import in_words, seconds_left, work
from scripts.learning.acceptance import counts_by_prompt

DOCS = Path("docs/ablation.md")

Results = Mapping[str, Sequence[dict[str, Any]]]
"""Of each variant by name, seed by seed."""


def main(arguments: Sequence[str] | None = None) -> None:
    options = _options(arguments)
    torch.set_num_threads(1)
    console = Console(width=max(144, Console().width))  # the tables are that wide
    try:
        with Run.open(options.recipe, options.overrides) as run:
            if not options.plan:
                for stage in ("prepare", "extract"):
                    run_stage(run, stage, console)
            _ablate(Bench.of(run, options, console), options, console)
    except PeagleError as error:
        sys.exit(f"error: {error}")


def _ablate(bench: Bench, options: argparse.Namespace, console: Console) -> None:
    grid = variants(bench.source)
    asked = only(grid, options.only) if options.only else grid
    whole = len(asked) == len(grid)
    tried = [Variant(BASE, BASE), *asked]
    _print_plan(bench, tried, options.workers, console)
    if options.plan:
        return
    results = _results(bench, tried, options.workers, console)
    tables = {bench.choose: _rows(tried, results)}
    console.print(report.terminal(_title(bench, bench.choose), tables[bench.choose]))

    gains = {row.name: row.measured for row in tables[bench.choose]}
    combination, left = combined(bench.source, winners(asked, gains))
    for variant in left:
        console.print(f"left out of the combination, for it does not go with better ones: {variant.name}")
    if not combination.overrides:
        console.print("no variant is better than the base, which stays as it is")
    else:
        console.print(f"combination: {' '.join(combination.overrides)}", markup=False, highlight=False)
        results = {**results, **_results(bench, [combination], options.workers, console)}
        last = [Variant(BASE, BASE), combination]
        tables["combination"] = _rows(last, results)
        console.print(report.terminal(_title(bench, bench.choose), tables["combination"]))
    ends = [Variant(BASE, BASE), *([combination] if combination.overrides else [])]
    if whole or options.final:
        tables[bench.final] = _rows(ends, _second_set(bench, ends, results))
        console.print(report.terminal(_title(bench, bench.final), tables[bench.final]))
    else:
        console.print(f"{bench.final} stays closed: this was a part of the groups (--final opens it)")
    _write(bench, options, combination, tables, results, console)


def _options(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.ablate",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("overrides", nargs="*", help="of the base recipe, as a.b=c")
    parser.add_argument("--recipe", default="smollm2", help="the base, and whose states are used")
    parser.add_argument("--seconds", type=float, default=120.0, help="CPU-seconds of each training")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1], help="one training of each setting")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1, help="trainings at one time")
    parser.add_argument(
        "--only", type=lambda text: text.split(","), default=[], help="groups, with commas between"
    )
    parser.add_argument("--choose-on", help="the held-out set that chooses; left out: the recipe's first")
    parser.add_argument("--final-on", help="the one that is opened at the end; left out: the recipe's last")
    parser.add_argument("--final", action="store_true", help="open it after a part of the groups too")
    parser.add_argument("--plan", action="store_true", help="say what would be trained, and end")
    parser.add_argument("--write-docs", action="store_true", help=f"put the tables into {DOCS}")
    parser.add_argument(
        "--output", type=Path, default=Path("runs/ablate"), help="where runs and tables are kept"
    )
    options = parser.parse_intermixed_args(arguments)
    options.command = shlex.join(sys.argv[1:] if arguments is None else arguments)
    return options


def _print_plan(bench: Bench, tried: Sequence[Variant], workers: int, console: Console) -> None:
    jobs = [job for variant in tried for job in bench.jobs(variant)]
    done = sum(job.done() is not None for job in jobs)
    left = in_words(seconds_left(jobs, workers))
    console.print(
        f"{len(tried) - 1} variants and the base, {len(bench.seeds)} seeds: {len(jobs)} trainings of "
        f"{bench.seconds:g} CPU-seconds, {done} of them there; about {left} for the others with {workers} "
        f"at a time, then the combination of the winners, {len(bench.seeds)} more",
        highlight=False,
    )


def _results(bench: Bench, tried: Sequence[Variant], workers: int, console: Console) -> Results:
    jobs = {variant.name: bench.jobs(variant) for variant in tried}
    done = iter(work([job for some in jobs.values() for job in some], workers, console))
    return {name: [next(done) for _ in some] for name, some in jobs.items()}


def _rows(tried: Sequence[Variant], results: Results) -> list[report.Row]:
    base = [counts_of(result) for result in results[BASE]]
    return [
        report.Row(
            group=variant.group,
            name=variant.name,
            steps=[result["steps"] for result in results[variant.name]],
            measured=measured([counts_of(result) for result in results[variant.name]], base),
            is_base=variant.name == BASE,
        )
        for variant in tried
    ]


def _second_set(bench: Bench, ends: Sequence[Variant], results: Results) -> Results:
    """Results whose counts are those of the set that nothing was chosen by; each head is measured once."""
    return {
        variant.name: [
            {**result, "counts": _final_counts(bench, job, result["k"]).tolist()}
            for job, result in zip(bench.jobs(variant), results[variant.name], strict=True)
        ]
        for variant in ends
    }


def _final_counts(bench: Bench, job: Job, k: int) -> Tensor:
    path = Path(job.directory) / f"{bench.final}.json"
    if not path.is_file():
        counts = counts_by_prompt(load_head(job.head).eval(), bench.store, bench.final, k)
        write_json(path, {"counts": counts.tolist()})
    return counts_of(read_json(path))


def _title(bench: Bench, name: str) -> str:
    prompts, k = len(bench.store.info(name)), bench.source.recipe().evaluate.k
    return (
        f"{name}, {prompts} prompts, K = {k}: acceptance length after {bench.seconds:g} CPU-seconds, "
        f"seeds {', '.join(map(str, bench.seeds))}"
    )


def _write(
    bench: Bench,
    options: argparse.Namespace,
    combination: Variant,
    tables: Mapping[str, Sequence[report.Row]],
    results: Results,
    console: Console,
) -> None:
    """The JSON in OUTPUT, and with --write-docs the page and a JSON beside it."""
    about = {
        "command": f"python -m scripts.ablate {options.command}".strip(),
        "commit": report.commit(),
        "code": bench.code,
        "base": fingerprint(bench.source.recipe().model_dump(mode="json")),
        "seconds": bench.seconds,
        "seeds": list(bench.seeds),
        "combination": list(combination.overrides),
        "tables": report.records(tables),
    }
    path = bench.output / "ablation.json"
    write_json(path, {**about, "trainings": results})
    console.print(f"written: {path}", highlight=False)
    if not options.write_docs:
        return
    texts = [f"`{about['command']}` at commit {about['commit']} printed:"]
    for name, rows in tables.items():
        texts.append(report.markdown(_title(bench, bench.choose if name == "combination" else name), rows))
    chosen = " ".join(combination.overrides) or "none: no variant is better than the base"
    texts.append(f"Combination of the winners: `{chosen}`")
    report.put_between(DOCS, "\n" + "\n\n".join(texts) + "\n")
    write_json(DOCS.with_suffix(".json"), about)
    console.print(f"written: {DOCS}, {DOCS.with_suffix('.json')}", highlight=False)


if __name__ == "__main__":
    main()
