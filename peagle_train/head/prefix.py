"""The attention of rows that share a prefix: each sees real slots up to its anchor, and its own chain.

Rows come by document and rising anchor, so they are cut into blocks of neighbouring anchors. What a block
sees of the real slots has one wide part that all its rows see, and an edge of at most `width` slots (with
a window two edges) where they differ:

    keys      0 ............... a_lo ...... a_hi        rows of a block: anchors a_lo .. a_hi
    block     [     clear      )[   edge    ]           clear: a kernel without any mask (`kernels.py`)
                                                        edge: products under a mask, width wide
    own       (a, 1..d), a band beside the diagonal (`chains.py`)

The three are merged by their log-sum-exp. No mask is larger than rows x 2 width; scores are never kept:
the backward computes them anew, block by block, from the merged log-sum-exp.

All mask slots enter layer 0 as one row, so there the slots of one position, (a, 3), (a+1, 2), (a+2, 1),
ask the very same query. Of the clear part they get the same answer: it is computed once per position.

Mask slots, the steps of an eagle3 unroll, and those prompt-free rows that the last layer needs all go this
way. The rule itself is `attention.visible`; tests demand equality with it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from peagle_train.head.alike import Alike, alike_of
from peagle_train.head.chains import OwnChains, own_backward, own_forward
from peagle_train.head.kernels import Kernel, merge_into, weigh, weigh_again

Own = tuple[Tensor, Tensor, OwnChains]
"""Keys and values [n, Hkv, D] of the rows' own chains, and which are whose."""

WIDTH = {"cpu": 128, "cuda": 512}
"""Anchors of a block, by kind of device: narrow edges against the cost of starting an operator."""


@dataclass(frozen=True)
class Block:
    """Neighbouring rows of one document. All ranges are half-open."""

    rows: tuple[int, int]
    clear: tuple[int, int]  # keys that every row sees
    edges: tuple[tuple[int, int], ...]  # keys that some rows see
    document: int  # its first real slot
    alike: Alike | None = None  # None: every row asks for itself


@dataclass(frozen=True)
class SharedPrefix:
    """Who sees which real slots, for m rows.

    anchor [m] row of each one's anchor among the real slots, depth [m], both on the rows' device.
    """

    anchor: Tensor
    depth: Tensor
    window: int | None
    blocks: tuple[Block, ...]

    def seen(self, block: Block, dtype: torch.dtype) -> Tensor:
        """[rows, edge keys]: 1 where a row sees an edge key, else 0."""
        (start, end), device = block.rows, self.anchor.device
        keys = torch.cat([torch.arange(a, b, device=device) for a, b in block.edges])
        anchor = self.anchor[start:end, None]
        seen = keys <= anchor
        if self.window is not None:
            seen = seen & (anchor + self.depth[start:end, None] - keys < self.window)
        return seen.to(dtype)


def shared_prefix(
    anchor: Tensor,
    depth: Tensor,
    documents: Sequence[tuple[int, tuple[int, int]]],
    window: int | None,
    device: torch.device,
) -> SharedPrefix:
    """Cuts rows into blocks.

    Args:
        anchor, depth: [m] int64 on the CPU; within a document anchors never fall.
        documents: first real slot of each, and the range of its rows.
        window: of the layer.
        device: where the rows are.
    """
    blocks = []
    width = WIDTH.get(device.type, WIDTH["cuda"])
    for first, (start, end) in documents:
        while start < end:
            low = int(anchor[start])
            stop = start + int(torch.searchsorted(anchor[start:end], low + width))
            blocks.append(_block(anchor, depth, first, start, stop, window))
            start = stop
    return SharedPrefix(anchor.to(device), depth.to(device), window, tuple(blocks))


def asking_alike(prefix: SharedPrefix, position: Tensor) -> SharedPrefix:
    """The same, for rows that ask equal queries where document and position [m], on the CPU, are equal."""
    device = prefix.anchor.device
    blocks = (replace(b, alike=alike_of(position[slice(*b.rows)], device)) for b in prefix.blocks)
    return replace(prefix, blocks=tuple(blocks))


def _block(anchor: Tensor, depth: Tensor, first: int, start: int, stop: int, window: int | None) -> Block:
    low, high = int(anchor[start]), int(anchor[stop - 1])
    clear, begin = (first, low), first
    if window is not None:
        position = anchor[start:stop] + depth[start:stop]
        begin = max(first, int(position.min()) - window + 1)
        clear = (max(first, int(position.max()) - window + 1), low)
    if clear[0] >= clear[1]:
        edges = [(begin, high + 1)]
        clear = (first, first)
    else:
        edges = [(begin, clear[0]), (low, high + 1)]
    return Block((start, stop), clear, tuple(edge for edge in edges if edge[0] < edge[1]), first)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    prefix: SharedPrefix,
    kernel: Kernel,
    own: Own | None = None,
) -> Tensor:
    """One softmax over the prefix and what each row has of its own.

    Args:
        q: [m, Hq, D].
        k, v: [Hkv, T, D] of the real slots.
        prefix: who sees which real slots.
        kernel: for the parts without a mask.
        own: the rows' own chains; None for real slots, which are part of the prefix.

    Returns:
        [m, Hq, D].
    """
    own_k, own_v, chains = own or (None, None, None)
    return _Attend.apply(q, k, v, own_k, own_v, chains, prefix, kernel)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        own_k: Tensor | None,
        own_v: Tensor | None,
        chains: OwnChains | None,
        prefix: SharedPrefix,
        kernel: Kernel,
    ) -> Tensor:
        with torch.autocast(q.device.type, enabled=False):
            rows = _by_key_head(q, k.shape[0])  # [Hkv, g, m, D]
            if own_k is None or own_v is None or chains is None:
                wide = torch.promote_types(q.dtype, torch.float32)
                out = torch.zeros_like(rows, dtype=wide)
                lse = torch.full(rows.shape[:-1], float("-inf"), dtype=wide, device=q.device)
            else:
                out, lse = own_forward(rows, own_k, own_v, chains)
            for block in prefix.blocks:
                here = (slice(None), slice(None), slice(*block.rows))
                for part, part_lse in _parts(rows[here], k, v, block, prefix, kernel):
                    mine, mine_lse = out[here], lse[here]
                    merge_into(mine, mine_lse, part, part_lse)
            result = _by_row(out.to(q.dtype))
        ctx.save_for_backward(q, k, v, own_k, own_v, result, lse)
        ctx.chains, ctx.prefix, ctx.kernel = chains, prefix, kernel
        return result

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
        q, k, v, own_k, own_v, out, lse = ctx.saved_tensors
        prefix: SharedPrefix = ctx.prefix
        with torch.autocast(q.device.type, enabled=False):
            rows, out, grad = (_by_key_head(t, k.shape[0]) for t in (q, out, grad.to(q.dtype)))
            wide = torch.promote_types(q.dtype, torch.float32)
            dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
            d_own_k = d_own_v = None
            if ctx.chains is None:
                dq = torch.zeros_like(rows, dtype=wide)
            else:
                dq, d_own_k, d_own_v = own_backward(grad, rows, own_k, own_v, out, lse, ctx.chains)
            for block in prefix.blocks:
                here = (slice(None), slice(None), slice(*block.rows))
                grad_b, q_b, out_b, lse_b = (t[here] for t in (grad, rows, out, lse))
                if block.clear[1] > block.clear[0]:
                    dq[here] += _clear_backward(grad_b, q_b, out_b, lse_b, k, v, dk, dv, block, ctx.kernel)
                if block.edges:
                    dq[here] += _edge_backward(grad_b, q_b, out_b, lse_b, k, v, dk, dv, block, prefix)
            dq, dk, dv = _by_row(dq.to(q.dtype)), dk.to(k.dtype), dv.to(v.dtype)
        return dq, dk, dv, d_own_k, d_own_v, None, None, None


def _by_key_head(x: Tensor, kv_heads: int) -> Tensor:
    """[m, Hq, D] -> [Hkv, g, m, D], a view."""
    return x.unflatten(1, (kv_heads, -1)).permute(1, 2, 0, 3)


def _by_row(x: Tensor) -> Tensor:
    """[Hkv, g, m, D] -> [m, Hq, D]."""
    return x.permute(2, 0, 1, 3).flatten(1, 2)


def _fold(x: Tensor) -> Tensor:
    """[Hkv, g, rows, ...] -> [Hkv, g * rows, ...]."""
    return x.flatten(1, 2).contiguous()


def _parts(
    q: Tensor, k: Tensor, v: Tensor, block: Block, prefix: SharedPrefix, kernel: Kernel
) -> Iterator[tuple[Tensor, Tensor]]:
    """(out, lse) of a block's rows [Hkv, g, rows, D] over its clear keys and over its edges."""
    clear, alike, groups = slice(*block.clear), block.alike, q.shape[1]
    if clear.stop > clear.start:
        asking = q if alike is None else alike.one_of_each(q)
        parts = kernel.forward(_fold(asking), k[:, clear], v[:, clear])
        out, lse = (t.unflatten(1, (groups, -1)) for t in parts)
        yield (out, lse) if alike is None else (alike.for_all(out), alike.for_all(lse))
    if block.edges:
        weights, lse = weigh(*_edge_scores(_fold(q), k, block, prefix))
        out = torch.bmm(weights.flatten(1, 2).to(v.dtype), _edge(v, block))
        yield out.unflatten(1, (groups, -1)), lse


def _clear_backward(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    block: Block,
    kernel: Kernel,
) -> Tensor:
    """Adds to dk and dv; returns the gradient of q. All of rows are [Hkv, g, rows, ...]."""
    clear, alike, groups = slice(*block.clear), block.alike, q.shape[1]
    if alike is not None:
        grad, q, out, lse = alike.sums(grad, q, out, lse)
    dq, dk_part, dv_part = kernel.backward(
        _fold(grad), _fold(q), k[:, clear], v[:, clear], _fold(out), _fold(lse)
    )
    dk[:, clear] += dk_part
    dv[:, clear] += dv_part
    dq = dq.unflatten(1, (groups, -1))
    return dq if alike is None else alike.to_the_one(dq)


def _edge(x: Tensor, block: Block) -> Tensor:
    """The edge keys or values of a block, [Hkv, n, D]."""
    parts = [x[:, start:end] for start, end in block.edges]
    return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


def _edge_scores(q: Tensor, k: Tensor, block: Block, prefix: SharedPrefix) -> tuple[Tensor, Tensor]:
    """[Hkv, g, rows, n] and what of it is seen; at least float32."""
    scores = torch.bmm(q, _edge(k, block).transpose(1, 2)).to(torch.promote_types(q.dtype, torch.float32))
    seen = prefix.seen(block, scores.dtype)
    return scores.mul_(q.shape[-1] ** -0.5).unflatten(1, (-1, len(seen))), seen


def _edge_backward(
    grad: Tensor,
    q: Tensor,
    out: Tensor,
    lse: Tensor,
    k: Tensor,
    v: Tensor,
    dk: Tensor,
    dv: Tensor,
    block: Block,
    prefix: SharedPrefix,
) -> Tensor:
    """Adds to dk and dv; returns the gradient of q. All of rows are [Hkv, g, rows, ...]."""
    keys, values, groups = _edge(k, block), _edge(v, block), q.shape[1]
    grad, q, out, lse = (_fold(t) for t in (grad, q, out, lse))
    scores, seen = _edge_scores(q, k, block, prefix)
    weights = weigh_again(scores, lse.view(scores.shape[:-1]), seen).flatten(1, 2)
    delta = (grad.to(weights.dtype) * out.to(weights.dtype)).sum(-1, keepdim=True)
    slope = torch.bmm(grad, values.transpose(1, 2)).to(weights.dtype)
    slope = slope.sub_(delta).mul_(weights).mul_(q.shape[-1] ** -0.5).to(q.dtype)
    dk_edge = torch.bmm(slope.transpose(1, 2), q)
    dv_edge = torch.bmm(weights.to(v.dtype).transpose(1, 2), grad)
    done = 0
    for start, end in block.edges:
        dk[:, start:end] += dk_edge[:, done : done + end - start]
        dv[:, start:end] += dv_edge[:, done : done + end - start]
        done += end - start
    return torch.bmm(slope, keys).unflatten(1, (groups, -1))
