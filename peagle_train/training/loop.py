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
import signal
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console
from torch import nn

from peagle_train.errors import PeagleError
from peagle_train.head.batch import PackedBatch, pack
from peagle_train.head.loss import count_elements
from peagle_train.head.model import DrafterHead
from peagle_train.recipe.schema import TrainSection
from peagle_train.store.documents import Documents
from peagle_train.training import checkpoint, validation
from peagle_train.training.bar import bar
from peagle_train.training.checkpoint import Standing
from peagle_train.training.data import Draw, Stream
from peagle_train.training.ending import why_ended
from peagle_train.training.guards import NOT_FINITE, SpikeGuard, culprits, refuse_nonfinite_weights
from peagle_train.training.module import DraftTraining
from peagle_train.training.resume import CHECKPOINTS, resume_point, trim_log
from peagle_train.training.schedule import learning_rate_at
from peagle_train.training.signals import StoppedError, StopSignals
from peagle_train.training.together import everywhere, on_main
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
        engine: dict[str, Any] | None = None,
    ):
        self.accelerator, self.data, self.section = accelerator, data, section
        self.seed, self.directory, self.console = seed, directory, console
        self.tracking, self.engine = tracking, engine or {}
        self.head: DrafterHead = module.head
        module.move_target_output(accelerator.device)
        optimizer = torch.optim.AdamW(
            _parameter_groups(self.head, section.weight_decay), lr=0.0, betas=section.betas, fused=True
        )
        self.module, self.optimizer = accelerator.prepare(module, optimizer)
        self.standing, self.guard = Standing(), SpikeGuard()

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
        rows = section.batch_rows * section.accumulate * accelerator.num_processes
        draws = self.data.stream.step(step, rows, accelerator.process_index, accelerator.num_processes)
        batches = [self._pack(draws[i :: section.accumulate]) for i in range(section.accumulate)]
        draft_ids = self.head.draft_token_ids
        counts = [count_elements(b.labels, draft_ids, section.loss) for b in batches]
        elements = accelerator.reduce(torch.stack(counts).sum(), "sum").clamp(min=1)

        rate = learning_rate_at(
            step,
            peak=section.learning_rate,
            warmup_steps=section.warmup_steps,
            total_steps=section.steps,
            decay=section.decay,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate

        loss = torch.zeros((), device=accelerator.device)
        correct = torch.zeros(section.positions, device=accelerator.device)
        seen = torch.zeros_like(correct)
        for index, batch in enumerate(batches):
            last = index == len(batches) - 1
            with nullcontext() if last else accelerator.no_sync(self.module):
                sums = self.module(batch)
                # Gradients are averaged over processes, hence the factor.
                accelerator.backward(sums.loss * accelerator.num_processes / elements)
            loss += sums.loss.detach()
            correct += sums.correct
            seen += sums.elements
        norm = accelerator.clip_grad_norm_(self.module.parameters(), section.clip_norm)
        loss, correct, seen = (accelerator.reduce(t, "sum") for t in (loss, correct, seen))
        tokens = accelerator.reduce(
            torch.tensor(sum(b.num_slots for b in batches), device=loss.device), "sum"
        )
        mean = float(loss / elements)
        spike = self._judge(step, mean, float(norm), draws)
        if spike is None or self.section.on_spike != "skip":
            self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return {
            "step": step + 1,
            "epoch": draws[0].epoch,
            "loss": mean,
            "accuracy": [round(float(c / s), 4) if s else None for c, s in zip(correct, seen, strict=True)],
            "learning_rate": rate,
            "gradient_norm": round(float(norm), 4),
            "elements": int(elements),
            "tokens": int(tokens),
            **({"spike": spike} if spike else {}),
        }

    def _pack(self, draws: Sequence[Draw]) -> PackedBatch:
        cod = self.section.cod
        documents = [
            self.data.documents.sampled(d.row, d.epoch, seed=self.seed, rate=cod.rate, floor=cod.floor)
            for d in draws
        ]
        return pack(documents).to(self.accelerator.device)

    def _judge(self, step: int, loss: float, norm: float, draws: Sequence[Draw]) -> str | None:
        """What the log is to say of a step that is unlike others; None: it is like them.

        Raises PeagleError if loss or norm is not finite, or if a spike is to stop the run.
        """
        found = on_main(self.accelerator, lambda: self.guard.judge(loss, norm))
        if not found:
            return None
        epochs = {draw.row: draw.epoch for draw in draws}
        module = self.accelerator.unwrap_model(self.module)

        def loss_of(row: int) -> float:
            batch = self._pack([Draw(row, epochs[row])]).to(self.accelerator.device)
            elements = count_elements(batch.labels, self.head.draft_token_ids, self.section.loss)
            return float(module(batch).loss / elements.clamp(min=1))

        rows = culprits(self.accelerator, list(epochs), loss_of, self.data.documents.store)
        if found.endswith(NOT_FINITE) or self.section.on_spike == "stop":
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
        accelerator, k, size = self.accelerator, self.section.positions, self.section.batch_rows
        everywhere(accelerator, self._refuse_nonfinite_weights)
        mine = self.data.validation[accelerator.process_index :: accelerator.num_processes]
        batches = [mine[i : i + size] for i in range(0, len(mine), size)]
        result = validation.measure(accelerator, self.head, self.data.documents, batches, k)
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
            on_main(accelerator, lambda: validation.keep_best(self.directory / "best", self.head, score))
        else:
            self.standing = replace(self.standing, stale=self.standing.stale + 1)

    def _save(self) -> None:
        everywhere(self.accelerator, self._refuse_nonfinite_weights)
        main = self.accelerator.is_main_process
        checkpoint.save_checkpoint(
            self.directory / CHECKPOINTS,
            self.accelerator,
            self.head,
            checkpoint.optimizer_tensors(self.head, self.optimizer.optimizer) if main else {},
            self.standing,
            engine=self.engine,
            guard=self.guard.state(),
            keep=self.section.keep_checkpoints,
        )

    def _refuse_nonfinite_weights(self) -> None:
        refuse_nonfinite_weights(self.head, self.standing.step, checkpoint.last_good(self.directory))

    def _resume(self) -> None:
        accelerator, folder = self.accelerator, self.directory / CHECKPOINTS
        saved = on_main(accelerator, lambda: resume_point(folder, self.console))
        if saved is not None:
            self.head.load_state_dict(saved.head_tensors())
            moments = saved.optimizer_tensors(accelerator.process_index)
            checkpoint.load_optimizer(self.head, self.optimizer.optimizer, moments)
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


def _parameter_groups(head: DrafterHead, weight_decay: float) -> list[dict[str, Any]]:
    """Weight decay for matrices; none for norms, biases, the placeholder state and the embedding table."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in head.named_parameters():
        if p.requires_grad:
            plain = p.ndim == 1 or name in ("mask_hidden", "embed_tokens.weight")
            (others if plain else decayed).append(p)
    return [{"params": decayed, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
