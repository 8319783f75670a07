"""Our side: first weights, step and optimizer of `peagle train`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console
from torch import nn

from peagle_train import Run
from peagle_train.head.batch import pack
from peagle_train.head.io import save_head
from peagle_train.store.documents import Documents
from peagle_train.store.states import StateStore
from peagle_train.target.adapter import Target
from peagle_train.training.data import Draw
from peagle_train.training.module import DraftTraining
from peagle_train.training.start import make_start
from scripts.compare_peer.learn import Job


class Ours:
    """The head of the job's recipe."""

    def __init__(self, job: Job, store: StateStore):
        self.job = job
        self.recipe = Run.open(job.recipe, job.overrides, write=False).recipe
        target = Target.load(job.target, dtype=self.recipe.target.dtype, device="cpu")
        folder = Path(job.vocabulary).parent
        start = make_start(self.recipe, target, store, job.rows, folder, Console(quiet=True))
        section = self.recipe.train
        self.documents = Documents(store, section.positions)
        self.module = DraftTraining(start.head, start.target_output, section.positions, section.loss).train()

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.module.head.parameters() if p.requires_grad]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        section = self.recipe.train
        adamw = torch.optim.AdamW(
            self.trained(),
            lr=self.job.rate,
            betas=section.betas,
            weight_decay=section.weight_decay,
            fused=True,
        )
        return [adamw]

    def step(self, draws: Sequence[Draw]) -> float:
        cod = self.recipe.train.cod
        rows = [
            self.documents.sampled(d.row, d.epoch, seed=self.job.seed, rate=cod.rate, floor=cod.floor)
            for d in draws
        ]
        sums = self.module(pack(rows))
        loss = sums.loss / sums.count.clamp(min=1)
        loss.backward()
        return float(loss.detach())

    def save(self, directory: Path) -> None:
        save_head(directory, self.module.head)


def build(job: Job, store: StateStore) -> Ours:
    return Ours(job, store)
