"""Module and optimizer as the launcher wraps them, behind one interface.

    Replicated   one process, or DDP: every process holds all of it
    Sharded      FSDP2: parameters, gradients and moments split (sharded.py)
    Partitioned  DeepSpeed ZeRO-1/2/3 (zero.py)

AdamW runs in float32 over float32 weights in each of them, so all train the same head. Gradients are averaged
over processes by all three, hence the factor `world` in `micro_batch`: with it, a step's gradient is that of
the loss summed over all elements of all micro-batches and processes, divided once by their number.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from peagle_train.head.batch import PackedBatch
from peagle_train.head.loss import LossSums
from peagle_train.head.model import DrafterHead
from peagle_train.recipe.schema import TrainSection
from peagle_train.training.module import DraftTraining

Tensors = dict[str, Tensor]


class StepModule(nn.Module):
    """What is wrapped: one call a micro-batch, so that wrappers see each parameter used and ready once.

    It returns a tuple, for FSDP2 and DeepSpeed look for tensors in tuples and not in our records.

    Args:
        training: head and target output.
        precision: "bf16" computes in bfloat16 over float32 weights.
        device: where batches are computed.
    """

    def __init__(self, training: DraftTraining, precision: str, device: torch.device):
        super().__init__()
        self.draft = training
        self.in_bfloat16, self.device_type = precision == "bf16", device.type

    def forward(self, batch: PackedBatch | None, anchor: Tensor | None = None) -> tuple[Tensor, ...]:
        """Loss sums of one micro-batch, see LossSums. anchor: [] added zero times, see zero.py."""
        with torch.autocast(self.device_type, torch.bfloat16, enabled=self.in_bfloat16):
            sums = self.draft(batch)
        loss = sums.loss if anchor is None else sums.loss + 0 * anchor
        return loss, sums.count, sums.correct, sums.elements


class Wrapped(ABC):
    """A head in training.

    Args:
        step: what is trained, on the device or not yet.
        section: optimizer settings.
        device: where batches are computed.
        world: number of processes.
        rank: of this process.
    """

    def __init__(self, step: StepModule, section: TrainSection, device: torch.device, world: int, rank: int):
        self.step_module, self.section = step, section
        self.device, self.world, self.rank = device, world, rank
        self.optimizer: Any = None  # whose steps and gradients these are, unless a subclass says otherwise

    @property
    def head(self) -> DrafterHead:
        """The head; under ZeRO-3 and FSDP2 its tensors are shards, see `gathered_head`."""
        return self.step_module.draft.head

    def micro_batch(self, batch: PackedBatch | None, elements: Tensor, last: bool) -> LossSums:
        """Forward and backward of one micro-batch; every process calls it equally often in a step.

        Args:
            batch: None: nothing to do, while other processes have something.
            elements: [] elements of the whole step, over all micro-batches and processes.
            last: of this step.

        Returns:
            its sums, without a graph.
        """
        batch = batch if batch is None else batch.to(self.device)
        with self._accumulating(last):
            sums = LossSums(*self._forward(batch))
            self._backward(sums.loss * self.world / elements)
        sums.loss = sums.loss.detach()
        return sums

    def step(self, learning_rate: float) -> None:
        """One step of the optimizer over the clipped gradients, which are then cleared."""
        for group in self._groups():
            group["lr"] = learning_rate
        self._step()

    def skip(self) -> None:
        """Forgets the gradients in place of `step`: weights and moments stay as they are."""
        self.optimizer.zero_grad(set_to_none=True)

    @property
    @abstractmethod
    def found(self) -> tuple[str, int]:
        """What the wrapping really is: (one, ddp, zero1, zero2, zero3 or fsdp2; processes)."""

    @abstractmethod
    def clip(self) -> float:
        """Norm of the step's gradient over all processes; `step` uses it scaled down to `clip_norm`."""

    @abstractmethod
    def head_tensors(self) -> Tensors:
        """The whole `head.state_dict()` on the CPU, in float32. Every process calls it and gets it."""

    @abstractmethod
    def optimizer_tensors(self) -> Tensors:
        """What this process must save for an exact resume, on the CPU; empty where it saves nothing."""

    @abstractmethod
    def load(self, head: Tensors, optimizer: Tensors) -> None:
        """Puts back what `head_tensors` and, of the same shard, `optimizer_tensors` gave."""

    def gathered_head(self) -> AbstractContextManager[DrafterHead]:
        """The head with all its weights, to read; every process enters and leaves together."""
        return nullcontext(self.head)

    @abstractmethod
    def _accumulating(self, last: bool) -> AbstractContextManager[Any]: ...

    @abstractmethod
    def _forward(self, batch: PackedBatch | None) -> tuple[Tensor, ...]: ...

    def _backward(self, loss: Tensor) -> None:
        loss.backward()

    def _groups(self) -> list[dict[str, Any]]:
        return self.optimizer.param_groups

    def _step(self) -> None:
        self.optimizer.step()
        self.skip()


class Replicated(Wrapped):
    """One process, or DDP."""

    def __init__(self, accelerator: Accelerator, step: StepModule, section: TrainSection):
        super().__init__(
            step, section, accelerator.device, accelerator.num_processes, accelerator.process_index
        )
        self.module, self.optimizer = accelerator.prepare(step, adamw(self.head, section))

    @property
    def found(self) -> tuple[str, int]:
        if isinstance(self.module, DistributedDataParallel):
            return "ddp", self.module.process_group.size()
        return "one", 1

    def clip(self) -> float:
        return float(nn.utils.clip_grad_norm_(self.module.parameters(), self.section.clip_norm))

    def head_tensors(self) -> Tensors:
        return on_cpu(self.head.state_dict())

    def optimizer_tensors(self) -> Tensors:
        if self.rank:
            return {}
        state = self.optimizer.optimizer.state
        return on_cpu({f"{n}|{key}": v for n, p in trained(self.head) for key, v in state[p].items()})

    def load(self, head: Tensors, optimizer: Tensors) -> None:
        self.head.load_state_dict(head)
        for name, parameter in trained(self.head):
            self.optimizer.optimizer.state[parameter] = {
                key: value.to(self.device) for key, value in part_of(optimizer, name).items()
            }

    def _accumulating(self, last: bool) -> AbstractContextManager[Any]:
        if last or not isinstance(self.module, DistributedDataParallel):
            return nullcontext()
        return self.module.no_sync()

    def _forward(self, batch: PackedBatch | None) -> tuple[Tensor, ...]:
        return self.module(batch)


def trained(head: DrafterHead) -> Iterator[tuple[str, nn.Parameter]]:
    """Name and parameter of all that is trained."""
    return ((name, p) for name, p in head.named_parameters() if p.requires_grad)


def adamw(head: DrafterHead, section: TrainSection) -> torch.optim.AdamW:
    """Weight decay for matrices; none for norms, biases, the placeholder state and the embedding table."""
    decayed: list[nn.Parameter] = []
    others: list[nn.Parameter] = []
    for name, p in trained(head):
        plain = p.ndim == 1 or name in ("mask_hidden", "embed_tokens.weight")
        (others if plain else decayed).append(p)
    groups = [
        {"params": decayed, "weight_decay": section.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=0.0, betas=section.betas, fused=True)


def on_cpu(tensors: Tensors) -> Tensors:
    """Copies that later steps do not change."""
    return {name: t.detach().to("cpu", copy=True).contiguous() for name, t in tensors.items()}


def part_of(tensors: Tensors, name: str) -> Tensors:
    """The tensors `name|key`, by key."""
    return {k.removeprefix(f"{name}|"): t for k, t in tensors.items() if k.startswith(f"{name}|")}
