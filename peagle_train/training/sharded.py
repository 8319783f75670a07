"""FSDP2 behind the interface of wrapped.py, by torch itself: accelerate only starts the processes.

accelerate's own preparation is not used, for on a CPU it trains without synchronising. torch's `fully_shard`
is the same on a CPU and on GPUs, so the tests run what a cluster runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from peagle_train.head.batch import PackedBatch
from peagle_train.head.model import DrafterHead
from peagle_train.recipe.schema import TrainSection
from peagle_train.training.wrapped import StepModule, Tensors, Wrapped, adamw, on_cpu, part_of, trained


class Sharded(Wrapped):
    """The head as one unit of FSDP2.

    Its parameters are gathered once, in the first forward of a step, kept for all micro-batches, and split
    again when the gradients have been reduced. What is not trained is not split.
    """

    def __init__(self, accelerator: Accelerator, step: StepModule, section: TrainSection):
        super().__init__(
            step, section, accelerator.device, accelerator.num_processes, accelerator.process_index
        )
        step.to(self.device)
        self.mesh = init_device_mesh(self.device.type, (self.world,))
        frozen = {p for p in step.parameters() if not p.requires_grad}
        self.module: FSDPModule = fully_shard(
            step, mesh=self.mesh, reshard_after_forward=False, ignored_params=frozen
        )
        self.optimizer = adamw(self.head, section)

    @property
    def found(self) -> tuple[str, int]:
        if all(isinstance(p, DTensor) and p.device_mesh == self.mesh for _, p in trained(self.head)):
            return "fsdp2", self.mesh.size()
        return "one", 1

    def clip(self) -> float:
        norm = nn.utils.clip_grad_norm_([p for _, p in trained(self.head)], self.section.clip_norm)
        return float(norm.full_tensor() if isinstance(norm, DTensor) else norm)

    def head_tensors(self) -> Tensors:
        state = self.head.state_dict()
        return on_cpu({n: t.full_tensor() if isinstance(t, DTensor) else t for n, t in state.items()})

    def optimizer_tensors(self) -> Tensors:
        state = {
            f"{name}|{key}": value.to_local() if isinstance(value, DTensor) else value
            for name, parameter in trained(self.head)
            for key, value in self.optimizer.state[parameter].items()
        }
        return on_cpu(state)

    @torch.no_grad()
    def load(self, head: Tensors, optimizer: Tensors) -> None:
        for name, into in self.head.state_dict().items():
            if isinstance(into, DTensor):
                whole = head[name].to(self.device)
                part = distribute_tensor(whole, self.mesh, into.placements, src_data_rank=None)
                into.to_local().copy_(part.to_local())
            else:
                into.copy_(head[name])
        for name, parameter in trained(self.head):
            assert isinstance(parameter, DTensor)
            state: dict[str, Tensor] = {}
            for key, value in part_of(optimizer, name).items():
                local = value.to(self.device)
                state[key] = local
                if key != "step":
                    state[key] = DTensor.from_local(
                        local,
                        self.mesh,
                        parameter.placements,
                        run_check=False,
                        shape=parameter.shape,
                        stride=parameter.stride(),
                    )
            self.optimizer.state[parameter] = state

    @contextmanager
    def gathered_head(self) -> Iterator[DrafterHead]:
        self.module.unshard()
        try:
            yield self.head
        finally:
            self.module.reshard()

    def _accumulating(self, last: bool) -> AbstractContextManager[Any]:
        self.module.set_requires_gradient_sync(last)
        self.module.set_reshard_after_backward(last)
        return nullcontext()

    def _forward(self, batch: PackedBatch | None) -> tuple[Tensor, ...]:
        return self.step_module(batch)
