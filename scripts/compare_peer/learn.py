"""One training by the clock: `python -m scripts.compare_peer.learn ours|peer JOB.json`.

Reads a job and a states store, leaves the side's head and result.json in the job's folder. Runs in either
environment: nothing here or in what it imports needs more than torch and safetensors.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal

import torch

from peagle_train.files import write_json
from peagle_train.store.states import StateStore
from peagle_train.training.data import Stream
from scripts.learning.clock import Learner, learn_by_clock

RESULT = "result.json"


@dataclass(frozen=True)
class Job:
    """One training.

    side: ours or peer. recipe, overrides: of the run whose states are used. vocabulary: safetensors with
    `token_ids`, the draft vocabulary. lengths: real slots of each row. probe: the row on which the peer shows
    its logits. seconds: CPU-seconds to train for. rate: the highest learning rate. warmup: share of the time
    in which it rises. optimizer, embeddings: the peer's (ours has the recipe's). target, positions, layers,
    aux_layers, mask_token_id: of the head.
    """

    side: Literal["ours", "peer"]
    recipe: str
    overrides: list[str]
    states: str
    target: str
    vocabulary: str
    directory: str
    rows: list[int]
    lengths: list[int]
    probe: int
    seed: int
    seconds: float
    rate: float
    optimizer: str
    embeddings: str
    warmup: float
    decay: Literal["linear", "cosine", "constant"]
    batch_tokens: int
    clip_norm: float
    positions: int
    layers: int
    aux_layers: list[int]
    mask_token_id: int


def stream_of(job: Job) -> Stream:
    """The batches of `peagle train`: one micro-batch a step."""
    return Stream(job.rows, job.lengths, job.seed, batch_tokens=job.batch_tokens)


def learn(learner: Learner, job: Job) -> dict[str, float]:
    """Trains until the process has spent the job's CPU-seconds; what was done."""
    return learn_by_clock(
        learner,
        stream_of(job),
        seconds=job.seconds,
        warmup=job.warmup,
        decay=job.decay,
        clip_norm=job.clip_norm,
    )


def main() -> None:
    torch.set_num_threads(1)
    job = Job(**json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")))
    build: Callable[[Job, StateStore], Learner]
    build = importlib.import_module(f"scripts.compare_peer.{job.side}").build
    torch.manual_seed(job.seed)
    learner = build(job, StateStore(Path(job.states)))
    done = learn(learner, job)
    directory = Path(job.directory)
    learner.save(directory)
    write_json(directory / RESULT, {"job": asdict(job), **done})


if __name__ == "__main__":
    main()
