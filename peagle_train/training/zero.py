"""DeepSpeed ZeRO-1/2/3 behind the interface of wrapped.py.

What DeepSpeed would do on its own is switched off or led: our loop owns loss scaling, accumulation
and the learning rate, and torch's AdamW is the optimizer, in float32; bfloat16 is autocast's, as
everywhere. So ZeRO trains what DDP trains, in less memory.

    stage 1   moments and master weights split       gradients reduced once a step
    stage 2   gradients split too                    reduced every micro-batch
    stage 3   parameters split too                   gathered every micro-batch

Stage 3 gathers for the whole of `StepModule` at once (a "leaf module"), whatever its forward calls inside.
DeepSpeed reduces a leaf's gradients when the gradient of the leaf's input is ready; our batches have
none, so a number that does not matter, the anchor, is an input that has one. Its hook was put into the graph
first, and autograd runs it last, when all gradients are there.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from peagle_train.errors import PeagleError
from peagle_train.head.batch import PackedBatch
from peagle_train.head.model import DrafterHead
from peagle_train.recipe.schema import TrainSection
from peagle_train.training.wrapped import StepModule, Tensors, Wrapped, adamw, on_cpu, part_of


class Partitioned(Wrapped):
    """ZeRO, in the stage the launcher asked for."""

    def __init__(self, accelerator: Accelerator, step: StepModule, section: TrainSection):
        super().__init__(
            step, section, accelerator.device, accelerator.num_processes, accelerator.process_index
        )
        if section.on_spike == "skip":
            raise PeagleError(
                "train.on_spike: found skip under DeepSpeed, whose gradients cannot be taken back; expected "
                "warn or stop (the key may change at any time), or a launch by DDP or FSDP2"
            )
        from deepspeed.utils import set_z3_leaf_modules

        _settle(accelerator.state.deepspeed_plugin.deepspeed_config, section)
        step.to(self.device)
        set_z3_leaf_modules(step, [StepModule])
        self.engine, _ = accelerator.prepare(step, adamw(self.head, section))
        self.stage: int = int(self.engine.zero_optimization_stage())
        self._anchor = torch.zeros((), device=self.device, requires_grad=True)

    @property
    def found(self) -> tuple[str, int]:
        from deepspeed import DeepSpeedEngine

        real = isinstance(self.engine, DeepSpeedEngine)
        return (f"zero{self.stage}" if real else "one"), self.engine.dp_world_size

    def clip(self) -> float:
        # The engine clips when it steps, and then it is too late to refuse a step; so this only measures.
        parts = self.engine.optimizer.averaged_gradients.values()
        square = torch.zeros((), device=self.device)
        for gradient in (g for part in parts if part is not None for g in part if g is not None):
            square += gradient.float().square().sum()
        torch.distributed.all_reduce(square)
        return float(square.sqrt())

    def head_tensors(self) -> Tensors:
        with self.gathered_head() as head:
            return on_cpu(head.state_dict())

    def optimizer_tensors(self) -> Tensors:
        tensors: Tensors = {}
        for index, part in enumerate(self._parts()):
            tensors[f"{index}|master"] = part.data
            tensors |= {f"{index}|{key}": value for key, value in self._moments().get(part, {}).items()}
        return on_cpu(tensors)

    @torch.no_grad()
    def load(self, head: Tensors, optimizer: Tensors) -> None:
        with self._gathered(write=True):
            self.head.load_state_dict(head)
        if self.stage == 3:
            self.engine.optimizer._partition_all_parameters()
        for index, part in enumerate(self._parts()):
            state = {key: value.to(self.device) for key, value in part_of(optimizer, str(index)).items()}
            part.data.copy_(state.pop("master"))
            self._moments()[part] = state
        self._spread()

    @contextmanager
    def gathered_head(self) -> Iterator[DrafterHead]:
        with self._gathered(write=False):
            yield self.head

    def _gathered(self, write: bool) -> AbstractContextManager[Any]:
        if self.stage < 3:
            return nullcontext()
        import deepspeed

        return deepspeed.zero.GatheredParameters(
            list(self.head.parameters()), modifier_rank=0 if write else None
        )

    def _spread(self) -> None:
        """Brings the weights that are computed with up to the master weights, as the end of a step does."""
        zero = self.engine.optimizer
        if self.stage < 3:
            zero.update_lp_params()
            return
        for index in range(len(zero.fp32_partitioned_groups_flat)):
            zero._reassign_or_swap_out_partitioned_parameters(index)
        if zero.persistent_parameters:
            zero.persistent_parameters[0].all_gather(zero.persistent_parameters)

    def _parts(self) -> list[Tensor]:
        """Flat master weights of this process, one tensor per group."""
        zero = self.engine.optimizer
        return zero.fp32_partitioned_groups_flat if self.stage == 3 else zero.single_partition_of_fp32_groups

    def _moments(self) -> Any:
        return self.engine.optimizer.optimizer.state

    def _accumulating(self, last: bool) -> AbstractContextManager[Any]:
        self.engine.set_gradient_accumulation_boundary(last)
        return nullcontext()

    def _forward(self, batch: PackedBatch | None) -> tuple[Tensor, ...]:
        return self.engine(batch, self._anchor)

    def _backward(self, loss: Tensor) -> None:
        self.engine.backward(loss, scale_wrt_gas=False)

    def _groups(self) -> list[dict[str, Any]]:
        return self.engine.optimizer.param_groups

    def discard(self) -> None:
        raise NotImplementedError("refused when the training was set up")

    def _step(self) -> None:
        self.engine.step()
        self._anchor.grad = None
        if not self.engine.was_step_applied():
            raise PeagleError(
                "DeepSpeed skipped an optimizer step, which it does when a gradient overflows: nothing was "
                "changed by this step. Try a lower train.learning_rate, or train.precision: fp32."
            )


def _settle(config: dict[str, Any], section: TrainSection) -> None:
    """Puts into DeepSpeed's configuration what the recipe decides.

    Raises PeagleError on what cannot be honoured.
    """
    for key in ("optimizer", "scheduler"):
        if key in config:
            raise PeagleError(
                f"the DeepSpeed configuration has a section {key!r}; expected none, for the recipe decides "
                "it (train.learning_rate, warmup_steps, decay, betas, weight_decay). Remove the section."
            )
    zero = config.get("zero_optimization", {})
    for key in ("offload_optimizer", "offload_param"):
        if zero.get(key, {}).get("device", "none") not in ("none", None):
            raise PeagleError(
                f"the DeepSpeed configuration asks for zero_optimization.{key}; it is not supported: a head "
                "is small beside its target. Use ZeRO-3 or FSDP2 over more processes, and set the device to "
                "none."
            )
    if zero.get("stage") not in (1, 2, 3):
        raise PeagleError(
            f"the DeepSpeed configuration asks for ZeRO stage {zero.get('stage')}; expected 1, 2 or 3. "
            "Without ZeRO, launch plain DDP: recipes/accelerate/eight_gpus.yaml"
        )
    config.update(
        train_micro_batch_size_per_gpu=1,
        gradient_accumulation_steps=1,
        gradient_clipping=section.clip_norm,
        zero_allow_untested_optimizer=True,
        fp16={"enabled": False},
        bf16={"enabled": False},
    )
