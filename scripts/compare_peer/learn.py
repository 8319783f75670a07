"""One training by the clock: `python -m scripts.compare_peer.learn ours|peer JOB.json`.

Reads a job and a states store, leaves the side's head and result.json in the job's folder. Runs in either
environment: nothing here or in what it imports needs more than torch and safetensors.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch
from torch import nn

from peagle_train.files import write_json
from peagle_train.store.states import StateStore
from peagle_train.training.data import Draw, Stream
from peagle_train.training.schedule import learning_rate_at

RESULT = "result.json"
FINENESS = 1000
"""Into so many parts the time is divided for the schedule of the learning rate."""


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


class Learner(Protocol):
    """A head in training."""

    def trained(self) -> list[nn.Parameter]: ...

    def optimizers(self) -> list[torch.optim.Optimizer]:
        """With the job's learning rate."""

    def step(self, draws: Sequence[Draw]) -> float:
        """Forward and backward over some rows, averaged over their elements; the loss."""

    def save(self, directory: Path) -> None:
        """The head, for `measure.py`."""


def stream_of(job: Job) -> Stream:
    """The batches of `peagle train`: one micro-batch a step."""
    return Stream(job.rows, job.lengths, job.seed, batch_tokens=job.batch_tokens)


def learn(learner: Learner, job: Job) -> dict[str, float]:
    """Trains until the process has spent the job's CPU-seconds; what was done."""
    stream, parameters = stream_of(job), learner.trained()
    optimizers = learner.optimizers()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    start, steps, loss = time.process_time(), 0, float("nan")
    while (spent := time.process_time() - start) < job.seconds:
        part = learning_rate_at(
            int(FINENESS * spent / job.seconds),
            peak=1.0,
            warmup_steps=round(FINENESS * job.warmup),
            total_steps=FINENESS,
            decay=job.decay,
        )
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * part
        (draws,) = stream.step(steps)
        loss = learner.step(draws)
        nn.utils.clip_grad_norm_(parameters, job.clip_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        steps += 1
    return {
        "steps": steps,
        "cpu_seconds": spent,
        "last_loss": loss,
        "trained": sum(p.numel() for p in parameters),
    }


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
