"""One training: `python -m scripts.ablate.job JOB.json`; leaves result.json, and the head if that is kept."""

from __future__ import annotations

import hashlib
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import peagle_train
from peagle_train.errors import PeagleError
from peagle_train.files import fingerprint, read_json, write_json
from peagle_train.recipe import Recipe, read_recipe
from peagle_train.store.documents import slot_counts, trainable_rows
from peagle_train.store.states import StateStore
from peagle_train.training.data import Stream
from scripts.learning.acceptance import counts_by_prompt
from scripts.learning.clock import learn_by_clock
from scripts.learning.ours import Ours

JOB, RESULT, LOG, HEAD = "job.json", "result.json", "log.txt", "head"

CODE = ("peagle_train/head", "peagle_train/store", "peagle_train/target", "peagle_train/training")
"""Whose change may change what is learned; recipes count by their values."""


@dataclass(frozen=True)
class Job:
    """One training.

    name: of the variant. directory: where its result goes. recipe, overrides: read in the process. states,
    target: folders. measure: the held-out set; no other is read. keep: whether the head stays. fingerprint:
    of all that the result depends on.
    """

    name: str
    directory: str
    recipe: str
    overrides: list[str]
    states: str
    target: str
    seed: int
    seconds: float
    measure: str
    keep: bool
    fingerprint: str

    @property
    def head(self) -> Path:
        return Path(self.directory) / HEAD

    def done(self) -> dict[str, Any] | None:
        """The result if it is there."""
        path = Path(self.directory) / RESULT
        result = dict(read_json(path)) if path.is_file() else None
        return result if result is not None and result["fingerprint"] == self.fingerprint else None


def fingerprint_of(recipe: Recipe, *, states: str, seed: int, seconds: float, measure: str, code: str) -> str:
    """Of all that the result of a job depends on. states: their fingerprint; code: `code_version()`."""
    return fingerprint(
        {
            "head": recipe.head.model_dump(mode="json"),
            "train": recipe.train.model_dump(mode="json"),
            "k": recipe.evaluate.k,
            "method": recipe.method,
            "states": states,
            "seed": seed,
            "seconds": seconds,
            "measure": measure,
            "code": code,
        }
    )


def code_version() -> str:
    """Sixteen digits of the code that trains and measures, and of torch."""
    root = Path(peagle_train.__file__).parents[1]
    own = [Path(__file__), *sorted((root / "scripts" / "learning").glob("*.py"))]
    files = [*own, *(file for folder in CODE for file in sorted((root / folder).rglob("*.py")))]
    digest = hashlib.sha256(torch.__version__.encode())
    for file in files:
        digest.update(file.name.encode() + file.read_bytes())
    return digest.hexdigest()[:16]


def train(job: Job) -> None:
    """Trains by the clock, measures, and writes the result last of all.

    Raises PeagleError if the recipe asks for several micro-batches a step.
    """
    start = time.monotonic()
    recipe = read_recipe(job.recipe, [*job.overrides, f"seed={job.seed}"]).recipe
    section = recipe.train
    if section.accumulate != 1:
        raise PeagleError(
            f"train.accumulate: found {section.accumulate}; expected 1, because a step by the clock is one "
            "micro-batch; raise train.batch_tokens instead"
        )
    directory, store = Path(job.directory), StateStore(Path(job.states))
    rows = trainable_rows(store, "train")
    torch.manual_seed(job.seed)
    learner = Ours(
        recipe, Path(job.target), store, rows, directory, seed=job.seed, rate=section.learning_rate
    )
    done = learn_by_clock(
        learner,
        Stream(rows, slot_counts(store, rows), job.seed, batch_tokens=section.batch_tokens),
        seconds=job.seconds,
        warmup=section.warmup_steps / section.steps,
        decay=section.decay,
        clip_norm=section.clip_norm,
    )
    head = learner.module.head.eval()
    counts = counts_by_prompt(head, store, job.measure, recipe.evaluate.k)
    if job.keep:
        job.head.mkdir(parents=True, exist_ok=True)
        learner.save(job.head)
    result = {**asdict(job), **done, "k": recipe.evaluate.k, "wall_seconds": time.monotonic() - start}
    write_json(directory / RESULT, {**result, "counts": counts.tolist()})


def counts_of(result: dict[str, Any]) -> Tensor:
    """[prompts, 2] drafts and accepted tokens of a result."""
    return torch.tensor(result["counts"], dtype=torch.float64)


if __name__ == "__main__":
    torch.set_num_threads(1)
    try:
        train(Job(**read_json(Path(sys.argv[1]))))
    except PeagleError as error:
        sys.exit(f"error: {error}")
