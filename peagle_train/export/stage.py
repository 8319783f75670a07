"""The export stage: the best checkpoint of a run becomes the directory that vLLM loads.

Reads training/best/, writes head/. The directory appears only after it has been proven (layout.py), with
its stage.json already inside, so a killed export leaves nothing half done.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from peagle_train.errors import CorruptError
from peagle_train.export.checks import HeadReport
from peagle_train.export.layout import export_head
from peagle_train.export.serving import serve_command
from peagle_train.files import read_json, remove_leftovers
from peagle_train.head.io import DESCRIPTION, load_head
from peagle_train.recipe.schema import TargetSection
from peagle_train.run import Run
from peagle_train.stages import StageResult, finished, make_room, require, seal
from peagle_train.target.source import obtain
from peagle_train.training.ending import steps_taken

FORMAT = "peagle-export-1"


def export(run: Run, console: Console) -> StageResult:
    """Exports the best head of a run, proves it, and prints what it is and how to serve it.

    Raises:
        PeagleError: training is missing or stale.
        HeadFault: the head does not fit its target or is not finite; nothing is written then.
    """
    recipe, directory = run.recipe, run.head_dir
    train = require(run, "train")
    best = run.training_dir / "best"
    if not (best / DESCRIPTION).is_file():
        raise CorruptError(
            f"{best}: no {DESCRIPTION}; expected the best checkpoint; run `{run.command_for('train')}` again"
        )
    # In a plain head nothing depends on K; a speculators config carries it.
    k = {"evaluate.k": recipe.evaluate.k} if recipe.export.format == "speculators" else {}
    parts: dict[str, Any] = {
        "stage": "export",
        "format": FORMAT,
        "train": train,
        "checkpoint": read_json(best / DESCRIPTION)["sha256"],
        "export": recipe.export.model_dump(mode="json"),
        **k,
    }
    done = finished(directory, parts, console)
    if done is not None:
        return done
    start = time.monotonic()
    make_room(directory, parts, console)
    remove_leftovers(run.directory)
    reference = target_reference(run, console)
    report = export_head(
        load_head(best),
        directory,
        target=run.facts,
        dtype=recipe.export.dtype,
        format=recipe.export.format,
        target_reference=reference,
        speculative_tokens=recipe.evaluate.k,
        extra=_provenance(run, parts["checkpoint"]),
        finish=lambda temporary: seal(temporary, parts, time.monotonic() - start),
    )
    serve = serve_command(
        directory,
        reference,
        recipe.evaluate.k,
        report.format,
        method=report.config.method,
        flags=report.flags,
    )
    print_report(report, serve, console)
    message = f"{directory} ({report.format}, {report.dtype}), proven: complete, finite, equal to {best}"
    return StageResult("export", time.monotonic() - start, False, message, run.command_for("evaluate"))


def target_reference(run: Run, console: Console) -> str:
    """How vLLM is told the target: a Hub id as it stands, anything local as an absolute folder."""
    return reference_of(run.recipe.target, console)


def reference_of(section: TargetSection, console: Console) -> str:
    """The same for the target of any recipe."""
    model = section.model
    if model.startswith("package:") or Path(model).expanduser().is_dir():
        return str(obtain(section, console).resolve())
    return model


def print_report(report: HeadReport, serve: str, console: Console) -> None:
    """What was proven, and the command that serves it."""
    table = Table(title=f"Head in {report.directory}", show_header=False)
    for name, value in report.rows():
        table.add_row(name, value)
    console.print(table)
    console.print("Serve it with", markup=False)
    console.print(f"  {serve}", markup=False, highlight=False, soft_wrap=True)


def _provenance(run: Run, checkpoint: str) -> dict[str, Any]:
    recipe = run.recipe
    return {
        "run": recipe.name,
        "recipe": run.source,
        "seed": recipe.seed,
        "steps": steps_taken(run.training_dir, recipe.train),
        "positions": recipe.train.positions,
        "k": recipe.evaluate.k,
        "target_revision": recipe.target.revision,
        "checkpoint_sha256": checkpoint,
    }
