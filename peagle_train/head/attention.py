"""Who sees whom.

`visible` is the rule, stated once. `RuleAttention` applies it literally, with a mask over all pairs:
the yardstick. `ChainAttention` computes the same without any such mask: real slots by causal
attention per document, mask slots against the prefix of real slots up to their anchor and their own
chain. It is what training runs.

An attention object is made for one batch and one window (None: no window), and called once per layer
with rotated queries and keys: `attend(q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D]) -> [N, Hq, D]`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle_train.head.batch import PackedBatch


class Attention(Protocol):
    """Mixes the rows of one layer."""

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor: ...


def visible(
    query_document: Tensor,
    query_anchor: Tensor,
    query_depth: Tensor,
    key_document: Tensor,
    key_anchor: Tensor,
    key_depth: Tensor,
    window: int | None = None,
) -> Tensor:
    """The attention rule: element (a, d) sees every real slot of its document up to a, and (a, 1..d).

    In a layer with a window it sees of these the last `window` positions, a + d included. Arguments
    broadcast against each other. Anchors are comparable within a document (positions or rows); a
    negative document is padding, which sees only itself and is seen by nobody else.
    """
    same_document = (query_document == key_document) & (query_document >= 0)
    real_prefix = (key_depth == 0) & (key_anchor <= query_anchor)
    own_chain = (key_depth > 0) & (key_anchor == query_anchor) & (key_depth <= query_depth)
    itself = (query_document < 0) & (key_document < 0) & (query_anchor == key_anchor)
    seen = same_document & (real_prefix | own_chain)
    if window is not None:
        seen = seen & (query_anchor + query_depth - (key_anchor + key_depth) < window)
    return seen | itself


class RuleAttention:
    """The rule as one dense mask over all rows: quadratic in memory, for tests and tiny batches."""

    def __init__(self, batch: PackedBatch, window: int | None = None):
        document, anchor, depth = batch.document, batch.anchor, batch.depth
        self.mask = visible(
            document[:, None],
            anchor[:, None],
            depth[:, None],
            document[None],
            anchor[None],
            depth[None],
            window,
        )

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", q, k) * q.shape[-1] ** -0.5
        weights = scores.masked_fill(~self.mask, float("-inf")).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, v)


class ChainAttention:
    """The same without a mask over all rows. Cost per document: causal attention over its slots, plus
    (mask slots) x (slots) for the prefixes, plus (mask slots) x (K - 1) for the chains.

    Rows of a chain are neighbours, so the keys of (a, 1..d) are the d rows that end at it.
    """

    def __init__(self, batch: PackedBatch, window: int | None = None):
        self.window = window
        self.slots = batch.num_slots
        self.slot_spans, self.mask_spans = batch.slot_spans, batch.mask_spans
        self.anchor = batch.anchor[self.slots :]  # [M]
        depth = batch.depth[self.slots :]
        self.longest = int(depth.max()) if depth.numel() else 0
        back = torch.arange(self.longest, device=depth.device)
        rows = torch.arange(depth.shape[0], device=depth.device)
        self.chain_rows = (rows[:, None] - back).clamp(min=0)  # [M, C] the row itself, then its predecessors
        self.outside_chain = back >= depth[:, None]  # [M, C]
        if window is not None:
            self.outside_chain = self.outside_chain | (back >= window)
        self.depth = depth

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        slots = self.slots
        outputs = [real_slots(q[:slots], k[:slots], v[:slots], self.slot_spans, self.window)]
        for (slot_start, slot_end), (start, end) in zip(self.slot_spans, self.mask_spans, strict=True):
            if end > start:
                outputs.append(self._chains(q[slots:], k, v, slot_start, slot_end, start, end))
        return torch.cat(outputs)

    def _chains(
        self, q: Tensor, k: Tensor, v: Tensor, slot_start: int, slot_end: int, start: int, end: int
    ) -> Tensor:
        """Mask slots start..end of one document."""
        anchor, slot = self.anchor[start:end, None], torch.arange(slot_start, slot_end, device=q.device)
        unseen = slot > anchor
        if self.window is not None:
            unseen = unseen | (anchor + self.depth[start:end, None] - slot >= self.window)
        rows = self.slots + self.chain_rows[start:end]
        return prefix_and_chain(
            q[start:end],
            (k[slot_start:slot_end], v[slot_start:slot_end], unseen),
            (k[rows], v[rows], self.outside_chain[start:end]),
        )


def real_slots(
    q: Tensor, k: Tensor, v: Tensor, spans: Sequence[tuple[int, int]], window: int | None
) -> Tensor:
    """The real slots of a batch, padding included: causal attention within each document."""
    outputs = [
        causal(q[start:end], k[start:end], v[start:end], window) for start, end in spans if end > start
    ]
    done = sum(len(o) for o in outputs)
    # A padding row sees itself alone: its output is its own value.
    outputs.append(v[done:].repeat_interleave(q.shape[1] // v.shape[1], 1))
    return torch.cat(outputs)


def prefix_and_chain(
    q: Tensor, prefix: tuple[Tensor, Tensor, Tensor], chain: tuple[Tensor, Tensor, Tensor]
) -> Tensor:
    """One softmax over two groups of keys: those all queries share, and those each query has of its own.

    Args:
        q: [m, Hq, D].
        prefix: keys and values [s, Hkv, D], and where they are unseen [m, s] bool.
        chain: keys and values [m, C, Hkv, D], and where they are unseen [m or 1, C] bool.

    Returns:
        [m, Hq, D].
    """
    (prefix_k, prefix_v, prefix_unseen), (chain_k, chain_v, chain_unseen) = prefix, chain
    m, heads, width = q.shape
    s, kv_heads, _ = prefix_k.shape
    q = (q * width**-0.5).view(m, kv_heads, heads // kv_heads, width)
    scores = torch.einsum("mhgd,shd->hgms", q, prefix_k).masked_fill(prefix_unseen, float("-inf"))
    own = torch.einsum("mhgd,mchd->hgmc", q, chain_k).masked_fill(chain_unseen, float("-inf"))
    weights = torch.cat([scores, own], -1).softmax(-1)
    out = torch.einsum("hgms,shd->mhgd", weights[..., :s], prefix_v)
    out = out + torch.einsum("hgmc,mchd->mhgd", weights[..., s:], chain_v)
    return out.reshape(m, heads, width)


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
