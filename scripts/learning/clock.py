"""A training that ends by the clock of its process. Nothing here needs more than torch."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Literal, Protocol

from torch import nn
from torch.optim import Optimizer

from peagle_train.training.data import Draw, Stream
from peagle_train.training.schedule import learning_rate_at

FINENESS = 1000
"""Into so many parts the time is divided for the schedule of the learning rate."""


class Learner(Protocol):
    """A head in training."""

    def trained(self) -> list[nn.Parameter]: ...

    def optimizers(self) -> list[Optimizer]:
        """With the highest learning rate in their groups."""

    def step(self, draws: Sequence[Draw]) -> float:
        """Forward and backward over some rows, averaged over their elements; the loss."""

    def save(self, directory: Path) -> None:
        """The head, to be measured."""


def learn_by_clock(
    learner: Learner,
    stream: Stream,
    *,
    seconds: float,
    warmup: float,
    decay: Literal["linear", "cosine", "constant"],
    clip_norm: float,
) -> dict[str, float]:
    """Trains until the process has spent `seconds` of CPU time; what was done.

    The learning rate follows the share of the time that is spent: it rises for the share `warmup`, then
    falls. Reading the rows counts; the start, before this call, does not. A step is one micro-batch.
    """
    parameters, optimizers = learner.trained(), learner.optimizers()
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    peaks = [group["lr"] for group in groups]
    start, steps, loss = time.process_time(), 0, float("nan")
    while (spent := time.process_time() - start) < seconds:
        part = learning_rate_at(
            int(FINENESS * spent / seconds),
            peak=1.0,
            warmup_steps=round(FINENESS * warmup),
            total_steps=FINENESS,
            decay=decay,
        )
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * part
        (draws,) = stream.step(steps)
        loss = learner.step(draws)
        nn.utils.clip_grad_norm_(parameters, clip_norm)
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
