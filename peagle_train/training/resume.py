"""Going on where a training stands: what must be as it was, and what is said about it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from peagle_train.errors import StaleError
from peagle_train.files import write_text
from peagle_train.stages import differences, read_record
from peagle_train.training import checkpoint
from peagle_train.training.checkpoint import Checkpoint
from peagle_train.versions import versions

CHECKPOINTS = "checkpoints"


def refuse_another(directory: Path, parts: Mapping[str, Any], command: str) -> None:
    """Refuses to leave an unfinished training for one of another recipe or of another number of processes.

    Hours of steps that nothing will ever finish are lost, even if the folder is kept. A finished one, or one
    without a checkpoint, loses nothing.

    Args:
        directory: training/.
        parts: of the training that is asked for.
        command: that trains.

    Raises StaleError with the keys that differ.
    """
    record = read_record(directory) if directory.is_dir() else None
    saved = checkpoint.checkpoints(directory / CHECKPOINTS)
    if record is None or record.finished is not None or not saved:
        return
    if changed := differences(record.parts, parts):
        raise StaleError(
            f"{directory}: holds an unfinished training ({saved[-1].name}) that was begun otherwise "
            f"({changed}). Put that back to go on with it, or begin the other one with `{command} --anew` "
            "(the old folder is kept)"
        )


def resume_point(directory: Path, console: Console) -> Checkpoint | None:
    """The newest whole checkpoint, after telling about damaged ones, which get another name.

    Raises CorruptError if all are damaged.
    """
    saved, faults = checkpoint.newest(directory)
    if saved is None:
        return None
    if faults:
        _set_damaged_aside(directory, saved)
        text = f"{'; '.join(faults)}; kept as damaged-*, the steps since {saved.path.name} are taken again"
        console.print(text, style="yellow", markup=False, highlight=False)
    console.print(f"going on from {saved.path}", markup=False, highlight=False)
    before, now = saved.state["versions"], versions()
    if changed := [
        f"{name} {before[name]}, now {now[name]}" for name in before if before[name] != now.get(name)
    ]:
        text = f"other versions since then ({'; '.join(changed)}): numbers may differ in the last bits"
        console.print(text, style="yellow", markup=False, highlight=False)
    return saved


def trim_log(path: Path, step: int) -> None:
    """Drops lines past `step`: they describe steps that are about to be taken again."""
    if path.is_file():
        kept = []
        for line in path.read_text(encoding="utf-8").splitlines():
            try:
                record = json.loads(line)
            except json.JSONDecodeError:
                continue  # the line that was being written when the process was killed
            if isinstance(record, dict) and record.get("step", step + 1) <= step:
                kept.append(line + "\n")
        write_text(path, "".join(kept))


def engine_of(directory: Path, device: torch.device) -> dict[str, Any]:
    """What the checkpoints of this training hold, or what this process would do: see checkpoint.py.

    Sums are split by threads, so their number is in the last bits of every weight.
    """
    stored = checkpoint.last_recorded(directory / CHECKPOINTS)
    if stored is not None:
        return stored.engine
    return {"threads": torch.get_num_threads()} if device.type == "cpu" else {}


@contextmanager
def threads_of(engine: Mapping[str, Any]) -> Iterator[None]:
    """Computes with the engine's number of threads for the block; as before if it names none."""
    before = torch.get_num_threads()
    torch.set_num_threads(engine.get("threads", before))
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _set_damaged_aside(directory: Path, whole: Checkpoint) -> None:
    """Renames folders newer than a whole checkpoint: they are damaged, and its steps are taken again."""
    for path in checkpoint.checkpoints(directory):
        if checkpoint.number_of(path) > checkpoint.number_of(whole.path):
            aside = path.with_name(f"damaged-{path.name}")
            shutil.rmtree(aside, ignore_errors=True)
            path.rename(aside)
