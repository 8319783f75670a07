"""Who sees whom.

`visible` is the rule, stated once. `RuleAttention` applies it literally, with a mask over all pairs: the
yardstick. What training runs has no such mask: real slots by causal attention (`causal.py`), all others
against a shared prefix and their own chain (`prefix.py`).

An attention object is made for one batch and one window (None: no window), and called once per layer
with rotated queries and keys: `attend(q [N, Hq, D], k [N, Hkv, D], v [N, Hkv, D]) -> [N, Hq, D]`.
"""

from __future__ import annotations

from typing import Protocol

import torch
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
