"""Causal attention within the documents of a batch, by torch's own attention: any device."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

Spans = Sequence[tuple[int, int]]
"""Per document the half-open range of its rows; together they start at 0 and leave no gaps."""


def real_slots(q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: int | None) -> Tensor:
    """The real slots of a batch, padding included: causal attention within each document.

    q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D].
    """
    outputs = [
        causal(q[start:end], k[start:end], v[start:end], window) for start, end in spans if end > start
    ]
    return torch.cat([*outputs, padding(q, v, spans)])


def padding(q: Tensor, v: Tensor, spans: Spans) -> Tensor:
    """What rows behind the last document get, [T - end, Hq, D]: each sees itself alone, so its own value."""
    done = max((end for _, end in spans), default=0)
    return v[done:].repeat_interleave(q.shape[1] // v.shape[1], 1)


def causal(q: Tensor, k: Tensor, v: Tensor, window: int | None = None) -> Tensor:
    """Causal grouped-query attention over one document. q [S, Hq, D], k and v [S, Hkv, D].

    With a window, blocks of `window` queries each see their own block of keys and the one before: cost
    and memory grow as S x window, and no mask is larger than window x 2 window.
    """
    size = q.shape[0]
    if window is None or window >= size:
        return _fused(q, k, v, None)
    outputs = []
    for start in range(0, size, window):
        end, first = min(start + window, size), max(start - window + 1, 0)
        back = torch.arange(start, end, device=q.device)[:, None] - torch.arange(first, end, device=q.device)
        outputs.append(_fused(q[start:end], k[first:end], v[first:end], (back >= 0) & (back < window)))
    return torch.cat(outputs)


def _fused(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None) -> Tensor:
    """torch's attention: causal, or under a mask [Q, S] of what is seen."""
    out = F.scaled_dot_product_attention(
        q.transpose(0, 1)[None],
        k.transpose(0, 1)[None],
        v.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        enable_gqa=q.shape[1] != k.shape[1],
    )
    return out[0].transpose(0, 1)
