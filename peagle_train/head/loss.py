"""What is minimised, element by element.

`kl`  KL(target || draft) over the draft vocabulary, the target's distribution renormalised to it.
      Elements whose own label lies outside the draft vocabulary are kept: the rest of the
      distribution still teaches.
`ce`  cross entropy with the target's greedy token; elements whose label cannot be drafted are dropped.

Sums are returned, never means: whoever adds up micro-batches and processes divides once, by the
number of elements of them all. Everything is float32 or wider: near convergence a KL in bfloat16
cancels to noise.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

LossKind = Literal["kl", "ce"]


@dataclass
class LossSums:
    """Sums over the supervised elements of a batch.

    loss: scalar, differentiable. count: [] elements it sums over. correct, elements: [K] by depth,
    how often the head's best token is the label, among how many elements.
    """

    loss: Tensor
    count: Tensor
    correct: Tensor
    elements: Tensor


def label_rows(labels: Tensor, draft_token_ids: Tensor) -> Tensor:
    """Draft ids of target ids [E], -1 where a token cannot be drafted; draft_token_ids [DV] rise."""
    at = torch.searchsorted(draft_token_ids, labels).clamp(max=draft_token_ids.shape[0] - 1)
    return torch.where(draft_token_ids[at] == labels, at, -1)


def count_elements(labels: Tensor, draft_token_ids: Tensor, kind: LossKind) -> Tensor:
    """[] how many elements the loss sums over; known before the forward, so micro-batches can share it."""
    return (label_rows(labels, draft_token_ids) >= 0).sum() if kind == "ce" else torch.ones_like(labels).sum()


def draft_loss(
    logits: Tensor,
    target_logits: Tensor,
    output_row: Tensor,
    labels: Tensor,
    draft_token_ids: Tensor,
    depth: Tensor,
    positions: int,
    kind: LossKind = "kl",
) -> LossSums:
    """The loss of one batch.

    Args:
        logits: [E, DV] the head's, for the supervised elements.
        target_logits: [P, DV] the target's, restricted to the draft vocabulary, one row per position
            (depths that share a position share its row).
        output_row: [E] row of `target_logits` for each element.
        labels: [E] target token ids.
        draft_token_ids: [DV] rising target ids of the draft vocabulary.
        depth: [E] of each element.
        positions: K.
        kind: "kl" or "ce".
    """
    wide = torch.promote_types(logits.dtype, torch.float32)
    logits = logits.to(wide)
    rows = label_rows(labels, draft_token_ids)
    with torch.no_grad():
        hit = (logits.argmax(-1) == rows).to(wide)
        zeros = torch.zeros(positions, dtype=wide, device=logits.device)
        correct = zeros.index_add(0, depth, hit)
        elements = zeros.index_add(0, depth, torch.ones_like(hit))
    if kind == "ce":
        loss = F.cross_entropy(logits, rows, ignore_index=-1, reduction="sum")
        return LossSums(loss, count_elements(labels, draft_token_ids, kind), correct, elements)
    with torch.no_grad():
        log_target = target_logits.to(wide).log_softmax(-1)
        target = log_target.exp()
        # A token that cannot occur has log 0; it contributes nothing to the entropy.
        negative_entropy = torch.where(target > 0, target * log_target, 0).sum(-1)
    cross = F.cross_entropy(logits, target[output_row], reduction="sum")
    loss = cross + negative_entropy[output_row].sum()
    return LossSums(loss, count_elements(labels, draft_token_ids, kind), correct, elements)
