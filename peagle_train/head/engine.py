"""Loss and gradients of one batch with the least memory and nothing computed twice.

    1. The real slots run once; their graph stays, with each layer's keys and values as its outputs.
    2. Group after group of chains: the mask slots run against copies of those keys and values that are
       leaves, loss and gradient come chunk by chunk (`loss.py`), a backward through the group adds to the
       gradients of parameters and leaves, and the group's graph is gone.
    3. One backward through the real slots, from their own loss and from what the groups left at the leaves.

All of it happens inside one forward call of the training module. `deliver` then makes the loss a node
whose backward hands out the finished gradients: to DDP, DeepSpeed and FSDP each parameter is ready exactly
once, however many groups a rank had.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from peagle_train.head.attention import RuleAttention
from peagle_train.head.backends import Backend, backend_for
from peagle_train.head.batch import PackedBatch
from peagle_train.head.forward import residuals
from peagle_train.head.loss import LossKind, LossSums, TargetOutput, VocabularyLoss
from peagle_train.head.model import DrafterHead
from peagle_train.head.streams import Group, RealStream, groups_of, mask_stream, real_stream

Gradients = list[Tensor | None]


@dataclass(frozen=True)
class EngineSettings:
    """How a batch is cut; results are the same for any cut, to rounding.

    group_rows: mask slots whose graph exists at one time (None: all). loss_rows: elements whose logits
    exist at one time. backend: see `backends.py`.
    """

    group_rows: int | None = 2048
    loss_rows: int = 256
    backend: str = "sdpa"


def loss_and_gradients(
    head: DrafterHead,
    target_output: TargetOutput,
    batch: PackedBatch,
    *,
    kind: LossKind,
    weights: Tensor,
    settings: EngineSettings,
    gradients: bool = True,
) -> tuple[LossSums, Gradients]:
    """The loss of a batch, and the gradient of its sum for every trained parameter.

    Args:
        head: the drafter.
        target_output: see `loss.TargetOutput`.
        batch: rows and kept chains.
        kind, weights: see `loss.VocabularyLoss`.
        settings: how the work is cut.
        gradients: False: the loss alone.

    Returns:
        the sums, and the gradients in the order of `trained_parameters(head)` (None: never touched).
    """
    loss = VocabularyLoss(head, target_output, batch, kind, weights, settings.loss_rows, gradients)
    total = _Total(trained_parameters(head))
    with torch.set_grad_enabled(gradients):
        if head.config.method == "peagle" and settings.backend != "reference":
            _two_streams(head, batch, loss, total, settings)
        else:
            _as_one_graph(head, batch, loss, total, settings)
    if gradients:
        total.add_to(head.norm.weight, loss.d_norm)
        total.add_to(head.lm_head.weight, loss.d_lm_head)
    return loss.sums, total.gradients


def trained_parameters(head: DrafterHead) -> list[nn.Parameter]:
    """In the order of `head.parameters()`."""
    return [p for p in head.parameters() if p.requires_grad]


class _Total:
    """Gradients of the trained parameters, added up over groups."""

    def __init__(self, parameters: list[nn.Parameter]):
        self.parameters = parameters
        self.gradients: Gradients = [None] * len(parameters)
        self.place = {id(p): i for i, p in enumerate(parameters)}

    def backward(
        self, outputs: Sequence[Tensor], grads: Sequence[Tensor], leaves: Sequence[Tensor] = ()
    ) -> list[Tensor | None]:
        """Adds what reaches the parameters; returns what reaches the leaves.

        Gradients are asked for, never accumulated into `.grad`: no wrapper's hook fires here.
        """
        with torch.autocast(outputs[0].device.type, enabled=False):
            found = torch.autograd.grad(
                outputs, [*self.parameters, *leaves], grads, allow_unused=True, materialize_grads=False
            )
        for parameter, gradient in zip(self.parameters, found, strict=False):
            self.add_to(parameter, gradient)
        return list(found[len(self.parameters) :])

    def add_to(self, parameter: Tensor, gradient: Tensor | None) -> None:
        place = self.place.get(id(parameter))
        if place is None or gradient is None:
            return
        mine = self.gradients[place]
        self.gradients[place] = gradient if mine is None else mine.add_(gradient)


def best_tokens(head: DrafterHead, batch: PackedBatch, settings: EngineSettings) -> Tensor:
    """The draft id [E] that the head likes best at each element, without ever having all logits."""
    best = torch.empty(batch.num_supervised, dtype=torch.int64, device=batch.positions.device)
    with torch.no_grad():
        if head.config.method == "peagle" and settings.backend != "reference":
            backend = backend_for(settings.backend)
            real = real_stream(head, batch, backend)
            for group in groups_of(head, batch, settings.group_rows):
                parts = _parts(head, batch, group, real, backend)
                _write_best(best, head, torch.cat(parts)[group.order], group.elements, settings.loss_rows)
        else:
            residual = _one_graph(head, batch, settings)
            _write_best(best, head, residual, torch.arange(len(best), device=best.device), settings.loss_rows)
    return best


def _write_best(best: Tensor, head: DrafterHead, residual: Tensor, elements: Tensor, rows: int) -> None:
    for part, places in zip(residual.split(rows), elements.split(rows), strict=True):
        best[places] = head.logits(part).argmax(-1)


def _two_streams(
    head: DrafterHead, batch: PackedBatch, loss: VocabularyLoss, total: _Total, settings: EngineSettings
) -> None:
    backend, gradients = backend_for(settings.backend), loss.gradients
    real = real_stream(head, batch, backend)
    outputs = real.read_by_masks()
    leaves = [t.detach().contiguous().requires_grad_(gradients) for t in outputs]
    lent = real.with_read_by_masks(leaves)
    d_real = torch.empty_like(real.residual) if gradients else None
    d_leaves: list[Tensor | None] = [None] * len(leaves)
    groups = groups_of(head, batch, settings.group_rows)
    for index, group in enumerate(groups):
        following = groups[index + 1].output_rows[0] if index + 1 < len(groups) else batch.last.shape[0]
        a, b = group.reals
        parts = _parts(head, batch, group, lent, backend)
        residual = torch.cat([p.detach() for p in parts])[group.order]
        found = loss(residual, group.elements, group.output_rows, following)
        if found is None or d_real is None:
            continue
        gradient = torch.empty_like(found)
        gradient[group.order] = found
        d_real[a:b] = gradient[: b - a]
        if len(parts) > 1:
            for i, d in enumerate(total.backward([parts[1]], [gradient[b - a :]], leaves)):
                before = d_leaves[i]
                d_leaves[i] = d if before is None or d is None else before.add_(d)
    if d_real is not None:
        pairs = [(o, d) for o, d in zip(outputs, d_leaves, strict=True) if d is not None]
        total.backward([real.residual, *(o for o, _ in pairs)], [d_real, *(d for _, d in pairs)])


def _parts(
    head: DrafterHead, batch: PackedBatch, group: Group, real: RealStream, backend: Backend
) -> list[Tensor]:
    """The residual stream of a group's elements: its real slots, and its mask slots if it has any."""
    reals = real.residual[slice(*group.reals)]
    if group.masks[0] == group.masks[1]:
        return [reals]
    return [reals, mask_stream(head, batch, group, real, backend)]


def _one_graph(head: DrafterHead, batch: PackedBatch, settings: EngineSettings) -> Tensor:
    """The residual stream [E, H] where there are no streams: eagle3's unroll, or the rule's dense mask."""
    if settings.backend != "reference":
        return residuals(head, batch)
    return residuals(head, batch, RuleAttention if head.config.method == "peagle" else None)


def _as_one_graph(
    head: DrafterHead, batch: PackedBatch, loss: VocabularyLoss, total: _Total, settings: EngineSettings
) -> None:
    residual = _one_graph(head, batch, settings)
    output_rows, order = torch.sort(batch.chains.output_row, stable=True)
    order = order.to(residual.device)
    found = loss(residual.detach()[order], order, output_rows.tolist(), batch.last.shape[0])
    if found is not None:
        gradient = torch.empty_like(found)
        gradient[order] = found
        total.backward([residual], [gradient])


def deliver(loss: Tensor, parameters: Sequence[Tensor], gradients: Gradients) -> Tensor:
    """`loss` as a node of autograd whose backward hands `gradients`, times its own, to `parameters`.

    A parameter without a gradient gets zeros: wrappers wait for every one. The backward runs once.
    """
    return _Deliver.apply(loss, gradients, *parameters)


class _Deliver(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, loss: Tensor, gradients: Gradients, *parameters: Tensor) -> Tensor:
        ctx.gradients = [
            torch.zeros_like(p) if g is None else g for p, g in zip(parameters, gradients, strict=True)
        ]
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[Any, ...]:
        if ctx.gradients is None:
            raise RuntimeError("the gradients of this batch were handed out already; run the forward again")
        gradients, ctx.gradients = ctx.gradients, None
        return None, None, *(g.mul_(scale) for g in gradients)
