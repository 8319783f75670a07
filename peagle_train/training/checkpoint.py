"""What a resume needs.

    training/
      draft_vocabulary.safetensors   the map, chosen once
      checkpoints/step-000200/       head.safetensors, head.json, optimizer-00000.safetensors ..., state.json
      best/                          the head with the highest acceptance on the validation set
      log.jsonl                      one line per logged step
      tracking/                      what trackers keep, see tracking.py

A checkpoint is a folder that appears whole: every process writes the optimizer tensors that it alone holds,
the main one writes state.json last, with size and checksum of every file, and gives the folder its name.
Nothing is pickled, and nothing is rounded: tensors keep their type. The step number is the data position,
the position in the learning-rate schedule and the state of every random draw, so state.json holds little:

    step, best_acceptance, best_step, stale, seconds    where the training stands (Standing)
    world       processes that wrote it
    engine      what was chosen on the machine (threads, backend, group sizes) and must stay the same
    guard       running statistics, see guards.py
    versions    of what computes
    files       {name: {bytes, sha256}}
    checksum    of all the above
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from accelerate import Accelerator
from torch import Tensor

from peagle_train.errors import CorruptError
from peagle_train.files import (
    atomic_directory,
    fingerprint,
    read_json,
    require_room,
    sha256_of,
    write_json,
)
from peagle_train.head.io import DESCRIPTION, WEIGHTS, load_head, save_head
from peagle_train.head.model import DrafterHead
from peagle_train.tensors import load_tensors, save_tensors
from peagle_train.training.together import everywhere, on_main
from peagle_train.training.wrapped import trained
from peagle_train.versions import versions

FORMAT = "peagle-checkpoint-2"
STATE = "state.json"
_NAME = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Standing:
    """Where a training stands.

    Attributes:
        step: optimizer steps done.
        best_acceptance: the highest validation acceptance length so far, and `best_step` where it was.
        stale: validations since then.
        seconds: wall clock of all attempts up to here, without what was lost with a killed one.
    """

    step: int = 0
    best_acceptance: float = 0.0
    best_step: int = 0
    stale: int = 0
    seconds: float = 0.0


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on the disk."""

    path: Path
    state: dict[str, Any]

    @property
    def standing(self) -> Standing:
        return Standing(**{field.name: self.state[field.name] for field in fields(Standing)})

    @property
    def engine(self) -> dict[str, Any]:
        """What the machine was made to do: JSON values, given to `save_checkpoint`."""
        return dict(self.state["engine"])

    @property
    def guard(self) -> dict[str, Any]:
        return dict(self.state["guard"])

    def head_tensors(self) -> dict[str, Tensor]:
        """The whole weights, on the CPU."""
        return load_head(self.path).state_dict()

    def optimizer_tensors(self, rank: int) -> dict[str, Tensor]:
        """What this rank saved; what rank 0 did, where that one alone saved."""
        own = optimizer_file(rank)
        return load_tensors(self.path / (own if own in self.state["files"] else optimizer_file(0)))


def optimizer_file(rank: int) -> str:
    """The name of a rank's part of the optimizer."""
    return f"optimizer-{rank:05d}.safetensors"


def checkpoints(directory: Path) -> list[Path]:
    """The folders of checkpoints, whole or damaged, oldest first."""
    return sorted((path for path in directory.glob("step-*") if _NAME.fullmatch(path.name)), key=number_of)


def last_recorded(directory: Path) -> Checkpoint | None:
    """The newest checkpoint with a whole state.json; its other files are not proven."""
    for path in reversed(checkpoints(directory)):
        with suppress(CorruptError):
            return Checkpoint(path, _read_state(path))
    return None


def read_checkpoint(path: Path) -> Checkpoint:
    """Proves a folder to be what was saved. Raises CorruptError, naming the file that is not."""
    state = _read_state(path)
    for name, entry in state["files"].items():
        file = path / name
        if not file.is_file() or file.stat().st_size != entry["bytes"]:
            raise CorruptError(f"{file}: missing or cut short")
        if sha256_of(file) != entry["sha256"]:
            raise CorruptError(f"{file}: differs from its checksum")
    return Checkpoint(path, state)


def newest(directory: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest whole checkpoint, and what is wrong with those that are newer.

    Raises CorruptError if there are checkpoints and none is whole: to begin again is for the user to decide.
    """
    faults: list[str] = []
    for path in reversed(checkpoints(directory)):
        try:
            return read_checkpoint(path), faults
        except CorruptError as error:
            faults.append(str(error).split("; move")[0])  # the cure of a single file is another
    if faults:
        raise CorruptError(
            f"{directory}: no checkpoint is whole ({'; '.join(faults)}); put the files back, or begin at "
            "step 0 with `peagle train RECIPE --anew` (the old folder is kept)"
        )
    return None, faults


def save_checkpoint(
    directory: Path,
    accelerator: Accelerator,
    head: DrafterHead,
    optimizer: Mapping[str, Tensor],
    standing: Standing,
    *,
    engine: Mapping[str, Any],
    guard: Mapping[str, Any],
    keep: int,
    weights: Mapping[str, Tensor] | None = None,
) -> Path:
    """Writes `directory/step-N`, then removes all but the newest `keep`; every process calls it.

    Args:
        directory: on a disk that all processes see.
        head: for its config; for its weights too, unless `weights` are given.
        optimizer: what this process alone holds; empty: nothing.
        engine, guard: JSON, given back on a resume.
        weights: the whole weights by name, in the main process.

    Raises:
        PeagleError: the disk has no room or a write failed, here or in another process. What stood there
            before is unchanged.
    """
    main, rank = accelerator.is_main_process, accelerator.process_index
    path = directory / f"step-{standing.step:06d}"
    whole = head.state_dict() if weights is None else weights
    sizes = everywhere(accelerator, lambda: _bytes(optimizer) + (_bytes(whole) if main else 0))
    on_main(
        accelerator, lambda: require_room(directory, sum(sizes), f"the checkpoint of step {standing.step}")
    )
    with ExitStack() as stack:
        folder = on_main(accelerator, lambda: str(stack.enter_context(atomic_directory(path))))
        parts = everywhere(accelerator, lambda: _write_part(Path(folder), rank, optimizer))
        state = {
            "format": FORMAT,
            **asdict(standing),
            "world": accelerator.num_processes,
            "engine": dict(engine),
            "guard": dict(guard),
            "versions": versions(),
        }
        on_main(accelerator, lambda: _write_rest(Path(folder), head, weights, state, parts))
        on_main(accelerator, stack.close)  # gives the folder its name
    if main:
        for old in checkpoints(directory)[:-keep]:
            shutil.rmtree(old)
    accelerator.wait_for_everyone()
    return path


def require_room_to_train(directory: Path, head: DrafterHead, keep: int) -> None:
    """Before the first step: raises PeagleError unless the disk can hold all that a training keeps at once.

    That are `keep` checkpoints and one that is being written, the best head and one that replaces it.
    """
    moments = 2 * sum(p.nbytes for _, p in trained(head))  # AdamW keeps two for each weight
    weights = _bytes(head.state_dict())
    peak = (keep + 1) * (weights + moments) + 2 * weights
    there = sum(file.stat().st_size for file in directory.rglob("*") if file.is_file())
    require_room(
        directory, max(0, peak - there), f"training ({keep} checkpoints, the best head, one of each more)"
    )


def last_good(directory: Path) -> str:
    """Where a user finds what a failed step has not touched, in words. directory: training/."""
    saved = checkpoints(directory / "checkpoints")
    good = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint was written yet"
    return f"{good}, the best head {directory / 'best'}"


def _read_state(path: Path) -> dict[str, Any]:
    state = read_json(path / STATE) if (path / STATE).is_file() else None
    if not isinstance(state, dict) or state.pop("checksum", None) != fingerprint(state):
        raise CorruptError(f"{path / STATE}: missing, or differs from its checksum")
    if state["format"] != FORMAT:
        raise CorruptError(f"{path}: format {state['format']!r}; this version reads {FORMAT!r}")
    return state


def number_of(path: Path) -> int:
    """The step of a checkpoint's folder."""
    return int(path.name.removeprefix("step-"))


def _write_part(folder: Path, rank: int, optimizer: Mapping[str, Tensor]) -> dict[str, Any]:
    """Writes what one process holds of the optimizer; its entry in `files`."""
    if not optimizer:
        return {}
    name = optimizer_file(rank)
    save_tensors(folder / name, dict(optimizer))
    return {name: _entry(folder / name)}


def _write_rest(
    folder: Path,
    head: DrafterHead,
    weights: Mapping[str, Tensor] | None,
    state: dict[str, Any],
    parts: list[dict[str, Any]],
) -> None:
    """Writes the head, and last state.json, over all that was written."""
    save_head(folder, head, weights)
    files = {name: _entry(folder / name) for name in (WEIGHTS, DESCRIPTION)}
    for part in parts:
        files |= part
    state = {**state, "files": files}
    write_json(folder / STATE, {**state, "checksum": fingerprint(state)})


def _entry(file: Path) -> dict[str, Any]:
    return {"bytes": file.stat().st_size, "sha256": sha256_of(file)}


def _bytes(tensors: Mapping[str, Tensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors.values())
