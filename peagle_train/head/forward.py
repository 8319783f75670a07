"""A batch through the head, whatever its method, as one differentiable computation.

Training computes the same in groups, with less memory (`engine.py`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from peagle_train.head.attention import Attention
from peagle_train.head.batch import PackedBatch
from peagle_train.head.model import DrafterHead
from peagle_train.head.streams import one_pass
from peagle_train.head.unroll import UnrollAttention, unroll


def residuals(
    head: DrafterHead, batch: PackedBatch, attention: Callable[..., Attention] | None = None
) -> Tensor:
    """The residual stream [E, H] of the batch's supervised elements, ready for `DrafterHead.logits`.

    Args:
        head: of either method: one pass for all depths, or eagle3's unroll.
        batch: rows and kept chains.
        attention: makes one layer's attention from (batch, window), for eagle3 from (batch, window, steps);
            every row is then computed by itself. None: two streams, or `UnrollAttention`.
    """
    if head.config.method == "eagle3":
        return unroll(head, batch, attention or UnrollAttention)
    if attention is None:
        return one_pass(head, batch)
    attend = {window: attention(batch, window) for window in set(head.config.windows)}
    embeddings, hidden = head.embed(batch.token_ids, batch.aux, mask_slots=batch.num_mask_slots > 0)
    spread = torch.arange(batch.positions.shape[0], device=batch.positions.device).clamp(max=batch.num_slots)
    attentions = [attend[window] for window in head.config.windows]
    return head.body(embeddings, hidden, batch.positions, attentions, spread, batch.supervised)
