"""The stages in their order, one at a time or all of them.

    prepare ──► extract ──► train ──► export ──► evaluate
    answers     states      training  head       evaluation   (folders of the run)

The table names each stage's function as text, so that `peagle --help` imports none of them.
"""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from peagle_train.errors import PeagleError
from peagle_train.files import read_json
from peagle_train.launched import launch_here, train_launched
from peagle_train.run import Run
from peagle_train.stages import StageResult, require
from peagle_train.summary import print_summary, summarise


@dataclass(frozen=True)
class Stage:
    """A row of the table.

    Attributes:
        name: the verb.
        function: `module:function`, called with (run, console).
        needs: stages whose output it reads.
    """

    name: str
    function: str
    needs: tuple[str, ...] = ()


STAGES = (
    Stage("prepare", "data_prep.prepare:prepare"),
    Stage("extract", "data_prep.extract:extract", ("prepare",)),
    Stage("train", "peagle_train.training.stage:train", ("extract",)),
    Stage("export", "peagle_train.export.stage:export", ("train",)),
    Stage("evaluate", "peagle_train.evaluation.stage:evaluate", ("extract", "train", "export")),
)


STATES = {
    "stored": "peagle_train.store.source:open_stored",
    "bounded": "data_prep.bounded:open_bounded",
    "online": "data_prep.online:open_online",
}
"""Where the rows of a training come from, by `states.mode`."""


def resolve(dotted: str) -> Callable[..., Any]:
    """The function that `module:function` names."""
    module, _, name = dotted.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def run_stage(run: Run, name: str, console: Console, **options: Any) -> StageResult:
    """Runs one stage, or skips it if its output is there, and says what happened.

    options: of the stage itself, as `train`'s anew.

    Raises PeagleError if a stage it reads from has not finished, StaleError if that one was made from
    other inputs than this recipe's.
    """
    stage = next(stage for stage in STAGES if stage.name == name)
    for need in stage.needs:
        require(run, need)
    if name in ("train", "evaluate"):
        options["open_states"] = states_of(run, name)
    result: StageResult = resolve(stage.function)(run, console, **options)
    _say(console, f"{name}: skipped, {result.message}" if result.skipped else f"{name}: {result.message}")
    return result


def states_of(run: Run, stage: str) -> Callable[..., Any]:
    """What opens the states that a stage reads; an evaluation has the target in it and needs no producer."""
    mode = run.recipe.states.mode
    return resolve(STATES["online" if stage == "evaluate" and mode == "bounded" else mode])


def next_command(run: Run, name: str) -> str:
    """The command that goes on after a stage."""
    names = [stage.name for stage in STAGES]
    after = names.index(name) + 1
    if after < len(names):
        return run.command_for(names[after])
    return f"peagle push {run.head_dir} {run.recipe.push.to or 's3://BUCKET/PREFIX'}"


def run_all(run: Run, console: Console) -> dict[str, Any]:
    """Runs every stage, writes summary.json, prints the table; returns the summary.

    A stage whose output is there already is skipped, so the same command resumes after a stop.
    """
    if run.recipe.track.log_with:  # before hours of answers, not after
        resolve("peagle_train.training.tracking:require_trackers")(run.recipe.track)
    launch = launch_here(run, console)
    _say(console, resolve("peagle_train.planning.report:run_in_short")(run))
    results = {}
    for number, stage in enumerate(STAGES, start=1):
        _say(console, f"\n[{number}/{len(STAGES)}] {stage.name}", style="bold")
        if stage.name == "train" and launch is not None:
            results[stage.name] = train_launched(run, launch, console)
        else:
            results[stage.name] = run_stage(run, stage.name, console)
    return finish(run, results, console)


def finish(run: Run, results: dict[str, StageResult], console: Console) -> dict[str, Any]:
    """Writes summary.json after the evaluation and prints it; `results` are the stages run just now."""
    summary = summarise(run, results, serve=_serve_command(run, console))
    print_summary(summary, console)
    _say(console, f"\nNumbers for machines: {run.summary_path}")
    return summary


def export_copy(run: Run, directory: Path, format: str, console: Console) -> str:
    """Writes the run's head once more, to `directory` in `format`, and proves it; head/ stays as it is.

    Prints how to serve it, and returns the command that measures it.

    Target, K and provenance are those that the run's own export recorded.

    Raises:
        PeagleError: something stands at `directory`, or the run has no finished export.
        HeadFault: the head is not sound.
    """
    require(run, "export")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        raise PeagleError(f"{directory}: found something there; expected no such path or an empty folder")
    from peagle_train.export.layout import export_head
    from peagle_train.export.serving import serve_command
    from peagle_train.export.stage import print_report
    from peagle_train.head.io import load_head

    record, k = read_json(run.head_dir / "export.json"), run.recipe.evaluate.k
    reference = record["target"]["reference"]
    report = export_head(
        load_head(run.training_dir / "best"),
        directory,
        target=run.facts,
        dtype=run.recipe.export.dtype,
        format=format,
        target_reference=reference,
        speculative_tokens=k,
        extra=record["provenance"],
    )
    method, flags = report.config.method, report.flags
    print_report(report, serve_command(directory, reference, k, format, method=method, flags=flags), console)
    _say(console, f"export: wrote {directory} ({format}); {run.head_dir} is unchanged")
    return f"{run.command_for('evaluate')} --head {shlex.quote(str(directory))}"


def evaluate_other(run: Run, head_dir: Path, console: Console) -> StageResult:
    """Measures any head on the run's held-out states; the run's own evaluation stays as it is."""
    from peagle_train.evaluation.stage import evaluate_head

    result = evaluate_head(run, head_dir, console, open_states=states_of(run, "evaluate"))
    _say(console, f"evaluate: {'skipped, ' if result.skipped else ''}{result.message}")
    return result


def _serve_command(run: Run, console: Console) -> str:
    """vLLM is given the target as the user named it; a packaged one as the folder it was turned into."""
    from peagle_train.export.serving import serve_command, serving_flags
    from peagle_train.export.stage import target_reference
    from peagle_train.head.config import HeadConfig

    target, recipe = target_reference(run, console), run.recipe
    head = HeadConfig.from_dict(read_json(run.head_dir / "export.json")["head"])
    return serve_command(
        run.head_dir,
        target,
        recipe.evaluate.k,
        recipe.export.format,
        method=head.method,
        flags=serving_flags(head, run.facts.kv_layers),
    )


def _say(console: Console, text: str, style: str | None = None) -> None:
    console.print(text, style=style, markup=False, highlight=False, soft_wrap=True)
