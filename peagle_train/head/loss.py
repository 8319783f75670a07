"""What is minimised, element by element, and its gradient, chunk by chunk.

`kl`  KL(target || draft) over the draft vocabulary, the target's distribution renormalised to it.
      Elements whose own label lies outside the draft vocabulary are kept: the rest of the
      distribution still teaches.
`ce`  cross entropy with the target's greedy token; elements whose label cannot be drafted are dropped.

Logits of all elements at once would be the largest tensor of a step by far (47,000 elements of 200,000
logits are 38 GB). `VocabularyLoss` makes those of one chunk, takes the loss and its gradient from them, and
lets them go: nothing is kept, nothing is computed again in the backward. The target's distribution is made
once per position: elements come in the order of the positions they predict, so the depths that share a
position meet in one chunk, or in neighbouring ones.

Sums are returned, never means: whoever adds up micro-batches and processes divides once, by the weight
of the elements of them all. Everything is float32 or wider: near convergence a KL in bfloat16 cancels
to noise.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle_train.head.batch import PackedBatch
from peagle_train.head.matmul import product
from peagle_train.head.model import DrafterHead

LossKind = Literal["kl", "ce"]
TargetOutput = Callable[[Tensor], Tensor]
"""The target's last states [P, TH] -> its logits over the draft vocabulary [P, DV]."""


@dataclass
class LossSums:
    """Sums over the supervised elements of a batch.

    loss: scalar, differentiable. count: [] weight of the elements it sums over (with equal weights their
    number). correct, elements: [K] by depth, how often the head's best token is the label, among how many.
    """

    loss: Tensor
    count: Tensor
    correct: Tensor
    elements: Tensor


def label_rows(labels: Tensor, draft_token_ids: Tensor) -> Tensor:
    """Draft ids of target ids [E], -1 where a token cannot be drafted; draft_token_ids [DV] rise."""
    at = torch.searchsorted(draft_token_ids, labels).clamp(max=draft_token_ids.shape[0] - 1)
    return torch.where(draft_token_ids[at] == labels, at, -1)


def depth_weights(
    weighting: Literal["equal", "corrected"], positions: int, rate: float, floor: float
) -> Tensor:
    """[K] weight of an element by depth.

    equal: 1. corrected: one over the share that COD keeps, max(rate ** d, floor), so that the expected loss
    is that of all elements.
    """
    if weighting == "equal":
        return torch.ones(positions)
    return torch.tensor([1.0 / max(rate**d, floor) for d in range(positions)])


def total_weight(batch: PackedBatch, draft_token_ids: Tensor, kind: LossKind, weights: Tensor) -> Tensor:
    """[] weight of what the loss sums over; known before the forward, so micro-batches can share it."""
    each = weights.to(batch.labels.device)[batch.depth[batch.supervised]]
    if kind == "ce":
        each = each * (label_rows(batch.labels, draft_token_ids) >= 0)
    return each.sum()


class VocabularyLoss:
    """Final norm, projection and loss of one batch: called with its elements, a group at a time.

    Args:
        head: the drafter; only its final norm and lm_head are used.
        target_output: frozen; not called for "ce".
        batch: whose elements come.
        kind: "kl" or "ce".
        weights: [K] by depth.
        chunk: elements whose logits exist at one time.
        gradients: whether they are taken; else `__call__` returns None.

    Attributes:
        sums: of what has come so far.
        d_norm, d_lm_head: gradients of the two parameters so far, in their dtypes; d_lm_head is None where
            the output matrix is frozen.
    """

    def __init__(
        self,
        head: DrafterHead,
        target_output: TargetOutput,
        batch: PackedBatch,
        kind: LossKind,
        weights: Tensor,
        chunk: int,
        gradients: bool,
    ):
        weight = head.lm_head.weight
        device = weight.device
        self.norm, self.batch, self.kind, self.chunk, self.gradients = (
            head.norm,
            batch,
            kind,
            chunk,
            gradients,
        )
        half = torch.is_autocast_enabled(device.type)
        self.compute = torch.get_autocast_dtype(device.type) if half else weight.dtype
        self.wide = torch.promote_types(weight.dtype, torch.float32)
        self.projection = weight.detach().to(self.compute)  # [DV, H]
        self.rows = label_rows(batch.labels, head.draft_token_ids)
        self.depth = batch.depth[batch.supervised]
        self.weights = weights.to(device, self.wide)
        self.weighted = weights.tolist() != [1.0] * len(weights)
        self.targets = _TargetRows(target_output, batch.last, self.wide)
        # Tensors this large are made once: fresh pages cost more than what fills them.
        shape = min(chunk, len(batch.supervised)), weight.shape[0]
        self.slope = torch.empty(shape, dtype=self.wide, device=device)
        self.target = torch.empty(shape if kind == "kl" else 0, dtype=self.wide, device=device)
        self.d_norm = torch.zeros_like(head.norm.weight) if gradients else None
        self.d_lm_head = torch.zeros_like(weight) if gradients and weight.requires_grad else None
        zeros = torch.zeros(len(weights), dtype=self.wide, device=device)
        zero = zeros.sum()
        self.sums = LossSums(zero, zero.clone(), zeros, zeros.clone())

    def __call__(
        self, residual: Tensor, elements: Tensor, output_rows: Sequence[int], keep: int
    ) -> Tensor | None:
        """Adds elements to the sums.

        Args:
            residual: [e, H] what the last layer left, of elements in the order of `output_rows`.
            elements: [e] which elements of the batch they are.
            output_rows: rising rows of `batch.last`, one per element.
            keep: later calls need no row of `batch.last` below this one.

        Returns:
            The gradient of the sum of losses with respect to `residual`.
        """
        count = residual.shape[0]
        result = torch.empty_like(residual) if self.gradients else None
        for start in range(0, count, self.chunk):
            end = min(start + self.chunk, count)
            gradient = self._chunk(
                residual[start:end], elements[start:end], output_rows[start], output_rows[end - 1]
            )
            if result is not None and gradient is not None:
                result[start:end] = gradient
            self.targets.forget(min(keep, output_rows[end] if end < count else keep))
        return result

    def _chunk(self, residual: Tensor, elements: Tensor, first: int, last: int) -> Tensor | None:
        rows, depth = self.rows[elements], self.depth[elements]
        with torch.set_grad_enabled(self.gradients):
            leaf = residual.detach().requires_grad_(self.gradients)
            normed = self.norm(leaf).to(self.compute)
        with torch.no_grad(), torch.autocast(residual.device.type, enabled=False):
            flat = normed.detach()
            count = len(flat)
            logits = product(flat, self.projection).to(self.wide)  # [c, DV]
            top, best = logits.max(-1)
            self._count(best == rows, depth)
            weight = self.weights[depth]
            if self.kind == "ce":
                weight = weight * (rows >= 0)
            slope = torch.softmax(logits, -1, out=self.slope[:count])
            log_sum = top - slope.gather(1, best[:, None])[:, 0].log()
            if self.kind == "ce":
                label = rows.clamp(min=0)[:, None]
                loss = log_sum - logits.gather(1, label)[:, 0]
                slope.scatter_add_(1, label, torch.full_like(label, -1, dtype=slope.dtype))
            else:
                target, negative_entropy = self.targets(first, last + 1)
                here = self.batch.output_row[elements] - first
                target = torch.index_select(target, 0, here, out=self.target[:count])
                slope.sub_(target)
                loss = log_sum - target.mul_(logits).sum(-1) + negative_entropy[here]
            self.sums.loss += (loss * weight).sum()
            self.sums.count += weight.sum()
            if not self.gradients:
                return None
            if self.weighted or self.kind == "ce":
                slope.mul_(weight[:, None])
            slope = slope.to(self.compute)
            assert self.d_norm is not None
            if self.d_lm_head is not None:
                if self.d_lm_head.dtype == self.compute:
                    self.d_lm_head.addmm_(slope.T, flat)
                else:
                    self.d_lm_head += slope.T @ flat
            d_normed = product(slope, self.projection.T)
            d_residual, d_norm = torch.autograd.grad(normed, (leaf, self.norm.weight), d_normed)
            self.d_norm += d_norm
        return d_residual

    def _count(self, hit: Tensor, depth: Tensor) -> None:
        self.sums.correct.index_add_(0, depth, hit.to(self.wide))
        self.sums.elements.index_add_(0, depth, torch.ones_like(hit, dtype=self.wide))


class _TargetRows:
    """The target's distribution at rows of `last`: each is made once, in order, and kept until forgotten."""

    def __init__(self, output: TargetOutput, last: Tensor, wide: torch.dtype):
        self.output, self.last, self.wide = output, last, wide
        self.start = 0
        self.target: Tensor | None = None  # [end - start, DV]
        self.negative_entropy: Tensor | None = None  # [end - start]

    def __call__(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        """Probabilities and negative entropies of rows first..end; every row of `last` is some element's."""
        made = self.start + (0 if self.target is None else len(self.target))
        if self.target is None or self.negative_entropy is None:
            self.target, self.negative_entropy = self._make(made, end)
        elif end > made:
            target, negative_entropy = self._make(made, end)
            self.target = torch.cat([self.target, target])
            self.negative_entropy = torch.cat([self.negative_entropy, negative_entropy])
        mine = slice(first - self.start, end - self.start)
        return self.target[mine], self.negative_entropy[mine]

    def _make(self, first: int, end: int) -> tuple[Tensor, Tensor]:
        log_target = F.log_softmax(self.output(self.last[first:end]).to(self.wide), -1)
        target = log_target.exp()
        # A token that cannot occur has log 0; it contributes nothing to the entropy.
        log_target.masked_fill_(target == 0, 0)
        return target, torch.linalg.vecdot(target, log_target)

    def forget(self, first: int) -> None:
        """Lets rows below `first` go."""
        if self.target is None or self.negative_entropy is None or first <= self.start:
            return
        cut = min(first - self.start, len(self.target))
        self.start += cut
        if cut == len(self.target):
            self.target = self.negative_entropy = None
        else:
            # Copies: a view would keep the whole alive.
            self.target, self.negative_entropy = (
                self.target[cut:].clone(),
                self.negative_entropy[cut:].clone(),
            )
