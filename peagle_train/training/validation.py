"""Held-out acceptance during training, and the head that has the most of it."""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import Tensor

from peagle_train.errors import CorruptError
from peagle_train.files import atomic_directory, read_json, require_room, write_json
from peagle_train.head.acceptance import Acceptance, offline_acceptance, total
from peagle_train.head.batch import Document
from peagle_train.head.engine import EngineSettings
from peagle_train.head.io import proven_config, save_head
from peagle_train.head.model import DrafterHead
from peagle_train.store.documents import Documents

SCORE = "score.json"


@torch.no_grad()
def measure(
    accelerator: Accelerator,
    head: DrafterHead,
    documents: Documents,
    batches: Iterable[Sequence[int]],
    k: int,
    settings: EngineSettings,
) -> Acceptance:
    """Acceptance summed over the rows of all processes; `batches` are this one's rows, cut as in training."""

    def read() -> Iterator[list[Document]]:
        for rows in batches:
            documents.store.upcoming(rows)
            yield [documents.full(row) for row in rows]

    counts = total((c for part in read() for c in offline_acceptance(head, part, k, settings)), k)
    values = torch.tensor([counts.num_drafts, *counts.accepted_at], device=accelerator.device)
    drafts, *accepted = (int(v) for v in accelerator.reduce(values, "sum"))
    return Acceptance(k, drafts, accepted)


def keep_best(
    directory: Path, head: DrafterHead, score: dict[str, Any], tensors: Mapping[str, Tensor] | None = None
) -> None:
    """Puts this head into `directory`, unless the one that stands there was accepted more.

    A better one stands there if steps are taken again, after a kill, that led to it once and on a GPU lead to
    another now: it is not lost. Call it with finite weights only. tensors: as for `save_head`.

    Raises PeagleError if the disk has no room; the old best stands until the new one is whole.
    """
    if directory.is_dir() and _accepted(best_score(directory)) > _accepted(score):
        return
    whole = head.state_dict() if tensors is None else tensors
    require_room(directory.parent, sum(t.nbytes for t in whole.values()), "the best head")
    with atomic_directory(directory) as temporary:
        save_head(temporary, head, tensors)
        write_json(temporary / SCORE, score)


def best_score(directory: Path) -> dict[str, Any]:
    """The score of the best head. Raises CorruptError if that is not there, or not what was saved."""
    proven_config(directory)
    try:
        score = dict(read_json(directory / SCORE))
        _accepted(score)
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise CorruptError(f"{directory / SCORE}: found no score ({error}); move {directory} away") from error
    return score


def best_stands(directory: Path, console: Console) -> bool:
    """Whether the best head is there and whole. A damaged one gets another name, and is told about."""
    if not directory.is_dir():
        return False
    try:
        best_score(directory)
        return True
    except CorruptError as error:
        aside = directory.with_name(f"damaged-{directory.name}")
        shutil.rmtree(aside, ignore_errors=True)
        directory.rename(aside)
        text = f"{error}; kept as {aside.name}, and the best head from here on takes its place"
        console.print(text, style="yellow", markup=False, highlight=False)
        return False


def score_of(step: int, result: Acceptance) -> dict[str, Any]:
    """The record of a measurement, in the log and beside the best head."""
    return {
        "step": step,
        "validation": {
            "acceptance_length": round(result.acceptance_length, 4),
            "per_position": [round(p, 4) for p in result.per_position],
            "num_drafts": result.num_drafts,
            "num_accepted": result.num_accepted,
            "k": result.k,
        },
    }


def _accepted(score: Mapping[str, Any]) -> float:
    """Accepted tokens per draft, unrounded."""
    counts = score["validation"]
    return float(counts["num_accepted"] / max(1, counts["num_drafts"]))
