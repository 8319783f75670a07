"""Our side: first weights, step and optimizer of `peagle train`, as a recipe says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from torch import nn
from torch.optim import Optimizer

from peagle_train.head.batch import pack
from peagle_train.head.io import save_head
from peagle_train.head.loss import depth_weights
from peagle_train.recipe import Recipe
from peagle_train.store.documents import Documents
from peagle_train.store.states import StateStore
from peagle_train.target.adapter import Target
from peagle_train.training.data import Draw
from peagle_train.training.module import DraftTraining
from peagle_train.training.start import make_start
from peagle_train.training.wrapped import adamw


class Ours:
    """The head of a recipe in training.

    Args:
        recipe: gives head, loss, optimizer; its seed is that of the first weights.
        target: folder of the target.
        store, rows: the states, and which rows are trained on.
        folder: where the draft vocabulary is kept.
        seed: of the COD draws.
        rate: the highest learning rate.
    """

    def __init__(
        self,
        recipe: Recipe,
        target: Path,
        store: StateStore,
        rows: list[int],
        folder: Path,
        *,
        seed: int,
        rate: float,
    ):
        self.section, self.seed, self.rate = recipe.train, seed, rate
        loaded = Target.load(
            target,
            dtype=recipe.target.dtype,
            device="cpu",
            trust_remote_code=recipe.target.trust_remote_code,
        )
        start = make_start(recipe, loaded, store, rows, folder, Console(quiet=True))
        positions, cod = self.section.positions, self.section.cod
        self.documents = Documents(store, positions)
        weights = depth_weights(self.section.depth_weights, positions, cod.rate, cod.floor)
        self.module = DraftTraining(start.head, start.target_output, positions, self.section.loss, weights)
        self.module.train()

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.module.head.parameters() if p.requires_grad]

    def optimizers(self) -> list[Optimizer]:
        optimizer = adamw(self.module.head, self.section)
        for group in optimizer.param_groups:
            group["lr"] = self.rate
        return [optimizer]

    def step(self, draws: Sequence[Draw]) -> float:
        cod = self.section.cod
        rows = [
            self.documents.sampled(d.row, d.epoch, seed=self.seed, rate=cod.rate, floor=cod.floor)
            for d in draws
        ]
        sums = self.module(pack(rows))
        loss = sums.loss / sums.count.clamp(min=1)
        loss.backward()
        return float(loss.detach())

    def save(self, directory: Path) -> None:
        save_head(directory, self.module.head)
