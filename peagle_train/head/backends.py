"""How attention is computed, by name.

    reference   the rule as one dense mask over all rows: quadratic memory, for comparisons
    sdpa        torch's own attention: any device

Real slots need causal attention per document; everything else goes through a kernel without masks
(`kernels.py`, `prefix.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle_train.head.kernels import Kernel, kernel_for

Spans = Sequence[tuple[int, int]]


def real_slots(q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: int | None) -> Tensor:
    """The real slots of a batch, padding included: causal attention within each document.

    q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D].
    """
    outputs = [
        causal(q[start:end], k[start:end], v[start:end], window) for start, end in spans if end > start
    ]
    done = sum(len(o) for o in outputs)
    if done < q.shape[0]:
        # A padding row sees itself alone: its output is its own value.
        outputs.append(v[done:].repeat_interleave(q.shape[1] // v.shape[1], 1))
    return torch.cat(outputs)


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


class Backend(Protocol):
    """Attention for the two streams."""

    name: str

    def real_slots(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: int | None) -> Tensor:
        """Causal attention within each document: q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
        ...

    def kernel(self, q: Tensor) -> Kernel:
        """The kernel for queries like these."""
        ...


class Sdpa:
    """torch's own attention."""

    name = "sdpa"

    def real_slots(self, q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: int | None) -> Tensor:
        return real_slots(q, k, v, spans, window)

    def kernel(self, q: Tensor) -> Kernel:
        return kernel_for(q.device, q.dtype, q.shape[-1]).kernel


def backend_for(name: str) -> Backend:
    return Sdpa()
