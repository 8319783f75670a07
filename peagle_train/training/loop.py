"""Steps, validation, checkpoints.

Each step sums its loss over all micro-batches of all processes and divides once, by the number of
supervised elements of them all: neither ranks nor micro-batches with few tokens weigh more than
others. Validation measures acceptance, not loss, because a falling loss can go with a falling
acceptance; the head that is kept is the one accepted most.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from peagle_train.errors import PeagleError
from peagle_train.head.acceptance import Acceptance, offline_acceptance, total
from peagle_train.head.batch import PackedBatch, pack
from peagle_train.recipe.schema import TrainSection
from peagle_train.store.documents import Documents, slot_counts
from peagle_train.training import checkpoint
from peagle_train.training.checkpoint import Progress as Standing
from peagle_train.training.data import Draw, Stream, in_order
from peagle_train.training.launch import wrap
from peagle_train.training.module import DraftTraining
from peagle_train.training.schedule import learning_rate_at
from peagle_train.training.tracking import Tracking


@dataclass(frozen=True)
class TrainingSet:
    """What is read: the stream of training rows and the rows that validate."""

    documents: Documents
    stream: Stream
    validation: Sequence[int]


class Loop:
    """One training run in one process; `run` takes it from where the folder stands to its last step."""

    def __init__(
        self,
        accelerator: Accelerator,
        module: DraftTraining,
        data: TrainingSet,
        section: TrainSection,
        *,
        seed: int,
        directory: Path,
        console: Console,
        tracking: Tracking | None = None,
    ):
        self.accelerator, self.data, self.section = accelerator, data, section
        self.seed, self.directory, self.console = seed, directory, console
        self.tracking = tracking
        self.training, self.head = module, module.head
        self.wrapped = wrap(accelerator, module, section)
        self.optimizer: Any = getattr(self.wrapped, "optimizer", None)
        self.standing = Standing()
        mine = list(data.validation[accelerator.process_index :: accelerator.num_processes])
        lengths = slot_counts(data.documents.store, mine)
        self.validation_batches = in_order(mine, lengths, section.batch_tokens)

    def run(self) -> Standing:
        """Trains to the last step. Raises PeagleError when the loss or a gradient is not finite."""
        self._resume()
        if self.standing.step == 0:
            self._validate()
        section, start = self.section, time.monotonic()
        with _progress(self.console, self.accelerator.is_main_process) as progress:
            task = progress.add_task(
                "train", total=section.steps, completed=self.standing.step, loss="–", rate="–", best="–"
            )
            tokens = 0
            for step in range(self.standing.step, section.steps):
                record = self._step(step)
                tokens += record["tokens"]
                self.standing = replace(self.standing, step=step + 1)
                rate = tokens / (time.monotonic() - start)
                if (step + 1) % section.log_every == 0 or step + 1 == section.steps:
                    self._log({**record, "tokens_per_second": round(rate, 1)})
                if (step + 1) % section.validate_every == 0 or step + 1 == section.steps:
                    self._validate()
                if (step + 1) % section.checkpoint_every == 0 or step + 1 == section.steps:
                    self._save()
                progress.update(
                    task,
                    advance=1,
                    loss=f"{record['loss']:.3f}",
                    rate=f"{rate:,.0f}",
                    best=f"{self.standing.best_acceptance:.3f}",
                )
        return self.standing

    def _step(self, step: int) -> dict[str, Any]:
        """One optimizer step; returns its record for the log."""
        section, accelerator = self.section, self.accelerator
        drawn = self.data.stream.step(step, accelerator.process_index)
        batches = [self._pack(draws) for draws in drawn]
        weights = torch.stack([self.training.weight_of(batch).to(accelerator.device) for batch in batches])
        elements = accelerator.reduce(weights.sum(), "sum").clamp(min=1)

        rate = learning_rate_at(
            step,
            peak=section.learning_rate,
            warmup_steps=section.warmup_steps,
            total_steps=section.steps,
            decay=section.decay,
        )

        loss = torch.zeros((), device=accelerator.device)
        correct = torch.zeros(section.positions, device=accelerator.device)
        seen = torch.zeros_like(correct)
        for index, batch in enumerate(batches):
            sums = self.wrapped.micro_batch(batch, elements, last=index == len(batches) - 1)
            loss += sums.loss
            correct += sums.correct
            seen += sums.elements
        norm = self.wrapped.clip()
        loss, correct, seen = (accelerator.reduce(t, "sum") for t in (loss, correct, seen))
        tokens = accelerator.reduce(
            torch.tensor(sum(b.num_slots for b in batches if b is not None), device=loss.device), "sum"
        )
        mean = float(loss / elements)
        self._refuse_nonfinite(step, mean, norm, [draw for draws in drawn for draw in draws])
        self.wrapped.step(rate)
        return {
            "step": step + 1,
            "epoch": self.data.stream.locate(step)[0],
            "loss": mean,
            "accuracy": [round(float(c / s), 4) if s else None for c, s in zip(correct, seen, strict=True)],
            "learning_rate": rate,
            "gradient_norm": round(norm, 4),
            "elements": int(elements),
            "tokens": int(tokens),
        }

    def _pack(self, draws: Sequence[Draw]) -> PackedBatch | None:
        """A micro-batch, on the CPU; None if there is nothing to do."""
        if not draws:
            return None
        cod = self.section.cod
        documents = [
            self.data.documents.sampled(d.row, d.epoch, seed=self.seed, rate=cod.rate, floor=cod.floor)
            for d in draws
        ]
        return pack(documents)

    def _refuse_nonfinite(self, step: int, loss: float, norm: float, draws: Sequence[Draw]) -> None:
        if math.isfinite(loss) and math.isfinite(norm):
            return
        saved = checkpoint.checkpoints(self.directory / "checkpoints")
        good = f"the last good checkpoint is {saved[-1]}" if saved else "no checkpoint was written yet"
        raise PeagleError(
            f"step {step + 1}: loss {loss}, gradient norm {norm}: not finite. This step changed no weight "
            f"and overwrote nothing; {good}, the best head {self.directory / 'best'}. Rows of the step: "
            f"{[d.row for d in draws]}. Try a lower train.learning_rate, or train.precision: fp32."
        )

    @torch.no_grad()
    def _validate(self) -> None:
        """Acceptance on the validation rows, shared by the processes and summed; a better head is kept."""
        accelerator, k = self.accelerator, self.section.positions
        with self.wrapped.gathered_head() as head:
            counts = total(
                (
                    c
                    for rows in self.validation_batches
                    for c in offline_acceptance(head, [self.data.documents.full(row) for row in rows], k)
                ),
                k,
            )
        values = torch.tensor([counts.num_drafts, *counts.accepted_at], device=accelerator.device)
        drafts, *accepted = (int(v) for v in accelerator.reduce(values, "sum"))
        result = Acceptance(k, drafts, accepted)
        score = {
            "step": self.standing.step,
            "validation": {
                "acceptance_length": round(result.acceptance_length, 4),
                "per_position": [round(p, 4) for p in result.per_position],
                "num_drafts": drafts,
                "k": k,
            },
        }
        self._log(score)
        if accelerator.is_main_process:
            self.console.print(
                f"step {self.standing.step}: validation acceptance length {result.acceptance_length:.3f} "
                f"(K = {k})",
                highlight=False,
            )
        if result.acceptance_length > self.standing.best_acceptance:
            self.standing = replace(
                self.standing, best_acceptance=result.acceptance_length, best_step=self.standing.step
            )
            if accelerator.is_main_process:
                checkpoint.save_best(self.directory / "best", self.head, score)
        accelerator.wait_for_everyone()

    def _save(self) -> None:
        if self.accelerator.is_main_process:
            checkpoint.save_checkpoint(
                self.directory / "checkpoints", self.head, self.optimizer.optimizer, self.standing
            )
        self.accelerator.wait_for_everyone()

    def _resume(self) -> None:
        saved = checkpoint.checkpoints(self.directory / "checkpoints")
        log = self.directory / "log.jsonl"
        if saved:
            self.standing = checkpoint.load_checkpoint(saved[-1], self.head, self.optimizer.optimizer)
            if self.accelerator.is_main_process:
                self.console.print(f"going on from {saved[-1]}")
        if self.accelerator.is_main_process:
            checkpoint.trim_log(log, self.standing.step if saved else -1)
        self.accelerator.wait_for_everyone()

    def _log(self, record: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            with (self.directory / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        if self.tracking is not None:
            self.tracking.follow()


def _progress(console: Console, shown: bool) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("loss {task.fields[loss]}"),
        TextColumn("{task.fields[rate]} tokens/s"),
        TextColumn("best acceptance {task.fields[best]}"),
        TimeRemainingColumn(),
        console=console,
        disable=not shown,
    )
