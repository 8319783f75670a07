"""Steps, and what happens between them: the log, validation, checkpoints, the end.

Each step sums its loss over all micro-batches of all processes and divides once, by the number of
supervised elements of them all: neither ranks nor micro-batches with few tokens weigh more than
others. Validation measures acceptance, not loss, because a falling loss can go with a falling
acceptance; the head that is kept is the one accepted most.

Nothing here draws from torch's global generator: a step is a function of its number, the weights and the
optimizer, so a training that goes on from a checkpoint ends as if it had never stopped.
"""

from __future__ import annotations

import json
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

from peagle_train.errors import PeagleError
from peagle_train.head.batch import PackedBatch, pack
from peagle_train.recipe.schema import TrainSection
from peagle_train.store.documents import Documents, slot_counts
from peagle_train.training import checkpoint, validation
from peagle_train.training.bar import bar
from peagle_train.training.checkpoint import Standing
from peagle_train.training.data import Draw, Stream, in_order
from peagle_train.training.ending import why_ended
from peagle_train.training.guards import SpikeGuard, culprits, refuse_nonfinite_weights
from peagle_train.training.launch import wrap
from peagle_train.training.module import DraftTraining
from peagle_train.training.resume import CHECKPOINTS, resume_point, trim_log
from peagle_train.training.schedule import learning_rate_at
from peagle_train.training.signals import StoppedError, StopSignals
from peagle_train.training.together import on_main
from peagle_train.training.tracking import Tracking

AHEAD = 8
"""Steps whose rows the source is told of before they are read."""


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
        engine: dict[str, Any] | None = None,
    ):
        self.accelerator, self.data, self.section = accelerator, data, section
        self.seed, self.directory, self.console = seed, directory, console
        self.tracking, self.engine = tracking, engine or {}
        self.training, self.head = module, module.head
        self.wrapped = wrap(accelerator, module, section)
        self.standing, self.guard = Standing(), SpikeGuard()
        self._told = 0  # steps up to which the source of rows was told what comes
        mine = list(data.validation[accelerator.process_index :: accelerator.num_processes])
        lengths = slot_counts(data.documents.store, mine)
        self.validation_batches = in_order(mine, lengths, section.batch_tokens)

    def run(self) -> Standing:
        """Trains to the last step, or to what ends a training before it (see ending.py).

        Raises:
            PeagleError: a loss, a gradient or a weight is not finite, or a checkpoint cannot be written.
            StoppedError: SIGTERM or SIGINT came, and all steps up to here are saved.
        """
        self._resume()
        if self.standing.best_acceptance == 0:
            self._validate()
        section, start, before, tokens = self.section, time.monotonic(), self.standing, 0
        main = self.accelerator.is_main_process
        with (
            StopSignals(self.console) as signals,
            bar(self.console, before.step, section.steps, shown=main) as advance,
        ):
            while why_ended(self.standing, section) is None:
                record = self._step(self.standing.step)
                tokens += record["tokens"]
                elapsed = time.monotonic() - start
                stop, seconds = self._agree(signals.number, before.seconds + elapsed)
                self.standing = replace(self.standing, step=record["step"], seconds=seconds)
                if self._due(section.log_every) or "spike" in record:
                    self._log({**record, "tokens_per_second": round(tokens / elapsed, 1)})
                if self._due(section.validate_every) or why_ended(self.standing, section):
                    self._validate()
                if self._due(section.checkpoint_every) or why_ended(self.standing, section) or stop:
                    self._save()
                advance(loss=record["loss"], rate=tokens / elapsed, best=self.standing.best_acceptance)
                if stop:
                    raise self._stopped(stop)
        return self.standing

    def _due(self, every: int) -> bool:
        return self.standing.step % every == 0 or self.standing.step == self.section.steps

    def _agree(self, signal_number: int, seconds: float) -> tuple[int, float]:
        """A signal that reached any process, and the main one's clock: all stop after the same step."""
        if self.accelerator.num_processes > 1:
            mine = [float(signal_number), seconds if self.accelerator.is_main_process else 0.0]
            told = self.accelerator.gather(
                torch.tensor([mine], dtype=torch.float64, device=self.accelerator.device)
            )
            signal_number, seconds = int(told[:, 0].max()), float(told[:, 1].sum())
        return signal_number, seconds

    def _step(self, step: int) -> dict[str, Any]:
        """One optimizer step; returns its record for the log."""
        section, accelerator = self.section, self.accelerator
        self._announce(step)
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
        spike = self._judge(step, mean, norm, [draw for draws in drawn for draw in draws])
        if spike is None or self.section.on_spike != "skip":
            self.wrapped.step(rate)
        else:
            self.wrapped.skip()
        return {
            "step": step + 1,
            "epoch": self.data.stream.locate(step)[0],
            "loss": mean,
            "accuracy": [round(float(c / s), 4) if s else None for c, s in zip(correct, seen, strict=True)],
            "learning_rate": rate,
            "gradient_norm": round(norm, 4),
            "elements": int(elements),
            "tokens": int(tokens),
            **({"spike": spike} if spike else {}),
        }

    def _announce(self, step: int) -> None:
        """Tells the source of rows what the next steps of this process will read."""
        last = min(step + AHEAD, self.section.steps)
        for coming in range(max(step, self._told), last):
            drawn = self.data.stream.step(coming, self.accelerator.process_index)
            self.data.documents.store.upcoming([draw.row for draws in drawn for draw in draws])
        self._told = max(self._told, last)

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

    def _judge(self, step: int, loss: float, norm: float, draws: Sequence[Draw]) -> str | None:
        """What the log is to say of a step that is unlike others; None: it is like them.

        Raises PeagleError if loss or norm is not finite, or if a spike is to stop the run.
        """
        found = on_main(self.accelerator, lambda: self.guard.judge(loss, norm))
        if not found:
            return None
        epochs = {draw.row: draw.epoch for draw in draws}

        def loss_of(row: int) -> float:
            batch = self._pack([Draw(row, epochs[row])])
            assert batch is not None
            loss, *_ = self.wrapped.step_module(batch.to(self.accelerator.device))
            return float(loss / self.training.weight_of(batch).clamp(min=1e-9))

        whole = self.wrapped.found[0] in ("one", "ddp")
        store = self.data.documents.store
        rows = culprits(self.accelerator, list(epochs), loss_of if whole else None, store)
        if not (math.isfinite(loss) and math.isfinite(norm)) or self.section.on_spike == "stop":
            raise PeagleError(
                f"step {step + 1}: {found}. This step changed no weight and overwrote nothing; "
                f"{checkpoint.last_good(self.directory)}. {rows}. Try a lower train.learning_rate, "
                "train.precision: fp32 or, to go on past a spike, train.on_spike: skip."
            )
        said = f"{found}. {rows}. Step {'skipped' if self.section.on_spike == 'skip' else 'taken'}"
        self.console.print(f"step {step + 1}: {said}", style="yellow", markup=False, highlight=False)
        return said

    def _validate(self) -> None:
        """Measures acceptance on the validation rows; the best head is kept."""
        accelerator, k = self.accelerator, self.section.positions
        weights = self._finite_weights()
        with self.wrapped.gathered_head() as head:
            documents, batches = self.data.documents, self.validation_batches
            result = validation.measure(accelerator, head, documents, batches, k, self.training.engine)
        score = validation.score_of(self.standing.step, result)
        self._log(score)
        if accelerator.is_main_process:
            self.console.print(
                f"step {self.standing.step}: validation acceptance length {result.acceptance_length:.3f} "
                f"(K = {k})",
                highlight=False,
            )
        if result.acceptance_length > self.standing.best_acceptance:
            self.standing = replace(
                self.standing,
                best_acceptance=result.acceptance_length,
                best_step=self.standing.step,
                stale=0,
            )
            best = self.directory / "best"
            on_main(accelerator, lambda: validation.keep_best(best, self.head, score, weights))
        else:
            self.standing = replace(self.standing, stale=self.standing.stale + 1)

    def _save(self) -> None:
        checkpoint.save_checkpoint(
            self.directory / CHECKPOINTS,
            self.accelerator,
            self.head,
            self.wrapped.optimizer_tensors(),
            self.standing,
            engine=self.engine,
            guard=self.guard.state(),
            keep=self.section.keep_checkpoints,
            weights=self._finite_weights(),
        )

    def _finite_weights(self) -> dict[str, torch.Tensor]:
        """The whole weights, for every process. Raises PeagleError if one of them is not finite."""
        weights, where = self.wrapped.head_tensors(), checkpoint.last_good(self.directory)
        on_main(self.accelerator, lambda: refuse_nonfinite_weights(weights, self.standing.step, where))
        return weights

    def _resume(self) -> None:
        accelerator, folder = self.accelerator, self.directory / CHECKPOINTS
        saved = on_main(accelerator, lambda: resume_point(folder, self.console))
        if saved is not None:
            moments = saved.optimizer_tensors(accelerator.process_index)
            self.wrapped.load(saved.head_tensors(), moments)
            self.standing, self.guard = saved.standing, SpikeGuard(saved.guard)
            if not on_main(
                accelerator, lambda: validation.best_stands(self.directory / "best", self.console)
            ):
                self.standing = replace(self.standing, best_acceptance=0.0, best_step=0)
        if accelerator.is_main_process:
            trim_log(self.directory / "log.jsonl", self.standing.step if saved else -1)
        accelerator.wait_for_everyone()

    def _stopped(self, number: int) -> StoppedError:
        return StoppedError(
            f"{signal.Signals(number).name}: stopped after step {self.standing.step} of {self.section.steps}"
            f", saved in {self.directory / 'checkpoints'}",
            number,
        )

    def _log(self, record: dict[str, Any]) -> None:
        if self.accelerator.is_main_process:
            with (self.directory / "log.jsonl").open("a", encoding="utf-8") as file:
                file.write(json.dumps(record) + "\n")
        if self.tracking is not None:
            self.tracking.follow()
