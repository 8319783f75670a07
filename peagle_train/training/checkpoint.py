"""What a resume needs, and the best head so far.

    training/
      draft_vocabulary.safetensors   the map, chosen once
      checkpoints/step-000200/       head.safetensors, head.json, optimizer.safetensors, state.json
      best/                          the head with the highest acceptance on the validation set
      log.jsonl                      one line per logged step
      tracking/                      what trackers keep, see tracking.py

A checkpoint is a folder that appears whole. The step number is the data position, the position in
the learning-rate schedule and the state of every random draw, so weights, optimizer moments and the
best score are all there is to save. Nothing is pickled.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from peagle_train.errors import CorruptError
from peagle_train.files import atomic_directory, read_json, sha256_of, write_json, write_text
from peagle_train.head.io import load_head, save_head
from peagle_train.head.model import DrafterHead
from peagle_train.tensors import load_tensors, save_tensors


@dataclass(frozen=True)
class Progress:
    """Where a run stands: steps done, and the best validation acceptance with its step."""

    step: int = 0
    best_acceptance: float = 0.0
    best_step: int = 0


def save_checkpoint(
    directory: Path, head: DrafterHead, optimizer: torch.optim.Optimizer, progress: Progress, keep: int = 1
) -> Path:
    """Writes `directory/step-N` atomically, then removes all but the newest `keep`."""
    path = directory / f"step-{progress.step:06d}"
    with atomic_directory(path) as temporary:
        save_head(temporary, head)
        file = temporary / "optimizer.safetensors"
        save_tensors(file, _optimizer_tensors(head, optimizer))
        write_json(temporary / "state.json", {**progress.__dict__, "optimizer_sha256": sha256_of(file)})
    for old in checkpoints(directory)[:-keep]:
        shutil.rmtree(old)
    return path


def checkpoints(directory: Path) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(p for p in directory.glob("step-*") if (p / "state.json").is_file())


def load_checkpoint(path: Path, head: DrafterHead, optimizer: torch.optim.Optimizer) -> Progress:
    """Puts weights and moments back; raises CorruptError if the folder differs from its checksums."""
    state = read_json(path / "state.json")
    file = path / "optimizer.safetensors"
    if sha256_of(file) != state.pop("optimizer_sha256"):
        raise CorruptError(
            f"{file}: differs from its checksum; remove {path}, and training goes on from an older "
            "checkpoint, or from the start"
        )
    head.load_state_dict(load_head(path).state_dict())
    tensors = load_tensors(file)
    for name, parameter in _trained(head):
        optimizer.state[parameter] = {
            key.removeprefix(f"{name}|"): value
            for key, value in tensors.items()
            if key.startswith(f"{name}|")
        }
    return Progress(**state)


def save_best(directory: Path, head: DrafterHead, score: dict[str, Any]) -> None:
    """Replaces `directory` with this head; the old best stands until the new one is whole."""
    with atomic_directory(directory) as temporary:
        save_head(temporary, head)
        write_json(temporary / "score.json", score)


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


def _trained(head: DrafterHead) -> Iterator[tuple[str, nn.Parameter]]:
    return ((name, p) for name, p in head.named_parameters() if p.requires_grad)


def _optimizer_tensors(head: DrafterHead, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    tensors = {}
    for name, parameter in _trained(head):
        for key, value in optimizer.state[parameter].items():
            tensors[f"{name}|{key}"] = value.detach().cpu().clone().contiguous()
    return tensors
