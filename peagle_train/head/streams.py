"""The two streams of a P-EAGLE batch.

    real slots    x[a+1], h[a]  ──►  layer 0  ──►  layer 1  ──► ... ──►  last layer (trained rows only)
                                      │ K/V         │ K/V                 │ K/V
    mask slots    one row, spread ──► layer 0  ──►  layer 1  ──► ... ──►  last layer
                                      + own chain   + own chain           + own chain

Real slots never look at a mask slot, so they run once, whatever becomes of the mask slots; these come in
groups of whole chains and read the real slots' keys and values. All mask slots enter layer 0 as one row:
its projections are computed once, and only RoPE tells the slots apart.

`real_stream` and `mask_stream` are the two; `groups_of` cuts a batch. `one_pass` runs both as one
differentiable computation; `engine.py` runs them with the least memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from torch import Tensor

from peagle_train.head.backends import Backend, backend_for
from peagle_train.head.batch import PackedBatch
from peagle_train.head.chains import OwnChains
from peagle_train.head.fused import rotate
from peagle_train.head.model import DrafterHead
from peagle_train.head.prefix import SharedPrefix, asking_alike, shared_prefix


@dataclass(frozen=True)
class Group:
    """Whole chains, neighbours in the batch: real slots a..b that carry loss, and their mask slots.

    Elements are (reals of the group, masks of the group); `order` sorts them by what they predict.
    """

    reals: tuple[int, int]  # which of the batch's A trained real slots
    masks: tuple[int, int]  # which of its M mask slots
    order: Tensor  # [e] permutation of the group's elements, on the batch's device
    elements: Tensor  # [e] the batch's elements, in that order, on its device
    output_rows: tuple[int, ...]  # [e] rows of `batch.last`, rising
    prefixes: tuple[SharedPrefix, ...]  # by layer: the real slots that its mask slots see
    chains: dict[int | None, OwnChains]  # by window: the mask slots that they see


@dataclass(frozen=True)
class MaskRow:
    """The one row all mask slots start as, behind layer 0's projections.

    q [1, Hq, D], k and v [1, Hkv, D], residual [1, H].
    """

    q: Tensor
    k: Tensor
    v: Tensor
    residual: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        return self.q, self.k, self.v, self.residual


@dataclass(frozen=True)
class RealStream:
    """What the real slots leave: the residual stream of trained ones, and what mask slots read."""

    residual: Tensor  # [A, H]
    keys: tuple[Tensor, ...]  # per layer [Hkv, T, D], rotated
    values: tuple[Tensor, ...]
    mask_row: MaskRow | None

    def read_by_masks(self) -> tuple[Tensor, ...]:
        """Every tensor through which mask slots reach the parameters of the real stream."""
        return (*self.keys, *self.values, *(self.mask_row.tensors() if self.mask_row else ()))

    def with_read_by_masks(self, tensors: Sequence[Tensor]) -> RealStream:
        """The same stream with these in the place of `read_by_masks`."""
        layers = len(self.keys)
        row = MaskRow(*tensors[2 * layers :]) if self.mask_row else None
        return replace(
            self, keys=tuple(tensors[:layers]), values=tuple(tensors[layers : 2 * layers]), mask_row=row
        )


def groups_of(head: DrafterHead, batch: PackedBatch, rows: int | None) -> list[Group]:
    """Cuts a batch into groups of at most `rows` mask slots (None: one group), but one chain at least."""
    return cut(head.config.windows, batch, rows)


def cut(windows: Sequence[int | None], batch: PackedBatch, rows: int | None) -> list[Group]:
    """`groups_of` a head whose layers have these windows."""
    table, limit = batch.chains, rows or max(batch.num_mask_slots, 1)
    ends, cuts = torch.cumsum(table.masks, 0), [0]
    while cuts[-1] < len(ends):
        taken = int(ends[cuts[-1] - 1]) if cuts[-1] else 0
        fitting = int(torch.searchsorted(ends, taken + limit, right=True))
        cuts.append(max(fitting, cuts[-1] + 1))
    return [_group(windows, batch, ends, a, b) for a, b in pairwise(cuts)]


def _group(windows: Sequence[int | None], batch: PackedBatch, ends: Tensor, a: int, b: int) -> Group:
    table, device = batch.chains, batch.positions.device
    first, last = (int(ends[a - 1]) if a else 0), int(ends[b - 1])
    chains = len(table.anchor)
    elements = torch.cat([torch.arange(a, b), torch.arange(chains + first, chains + last)])
    output_rows, order = torch.sort(table.output_row[elements], stable=True)
    counts = table.masks[a:b]
    anchor = torch.repeat_interleave(table.anchor[a:b], counts)
    starts = torch.repeat_interleave(torch.cumsum(counts, 0) - counts, counts)
    depth = torch.arange(len(anchor)) - starts + 1
    spans = [
        (slot, (max(start, first) - first, min(end, last) - first))
        for (slot, _), (start, end) in zip(batch.slot_spans, batch.mask_spans, strict=True)
        if max(start, first) < min(end, last)
    ]
    seen = {window: shared_prefix(anchor, depth, spans, window, device) for window in set(windows)}
    # In layer 0 all mask slots are one row, so those of one position ask the same.
    prefixes = asking_alike(seen[windows[0]], anchor + depth), *(seen[window] for window in windows[1:])
    lengths = {window: depth if window is None else depth.clamp(max=window) for window in seen}
    own = {w: OwnChains(1, n.to(device), int(n.max()) if len(n) else 1) for w, n in lengths.items()}
    return Group(
        (a, b),
        (first, last),
        order.to(device),
        elements[order].to(device),
        tuple(output_rows.tolist()),
        prefixes,
        own,
    )


def real_stream(head: DrafterHead, batch: PackedBatch, backend: Backend) -> RealStream:
    """Runs the real slots. In the last layer only those that carry loss have queries; all have keys."""
    slots, masks = batch.num_slots, batch.num_mask_slots > 0
    trained = batch.supervised[: len(batch.chains.anchor)]
    embeddings, residual = head.embed(batch.token_ids, batch.aux, mask_slots=masks)
    cos, sin = head.turns(batch.positions[:slots], residual.dtype)
    keys, values, mask_row = [], [], None
    for index, (layer, window) in enumerate(zip(head.blocks, head.config.windows, strict=True)):
        last, attention = index == len(head.blocks) - 1, layer.self_attn
        x = layer.input_layernorm(residual) if index else None
        if x is None:
            x, residual = layer.enter(embeddings, residual)
        k, v = attention.keys_and_values(x)
        asking = x if not last else torch.cat([x.index_select(0, trained), x[slots:]])
        q = attention.queries(asking)
        if index == 0 and masks:
            mask_row = MaskRow(q[-1:], k[-1:], v[-1:], residual[-1:])
            q, k, v, residual = q[:-1], k[:-1], v[:-1], residual[:-1]
        k = rotate(k, cos, sin).to(v.dtype)
        if last:
            residual = residual.index_select(0, trained)
            q = rotate(q, cos[trained], sin[trained]).to(v.dtype)
        else:
            q = rotate(q, cos, sin).to(v.dtype)
        keys.append(k.transpose(0, 1))
        values.append(v.transpose(0, 1))
        if last:
            prefix = trained_prefix(batch, window)
            mixed = backend.attend(q, keys[-1], values[-1], prefix)
        else:
            mixed = backend.real_slots(q, k, v, batch.slot_spans, window)
        residual = layer.finish(residual, mixed)
    return RealStream(residual, tuple(keys), tuple(values), mask_row)


def trained_prefix(batch: PackedBatch, window: int | None) -> SharedPrefix:
    """Who the trained real slots see in the last layer."""
    anchor = batch.chains.anchor
    bounds = torch.searchsorted(anchor, torch.tensor([end for _, end in batch.slot_spans])).tolist()
    spans = [
        (first, (start, end))
        for (first, _), start, end in zip(batch.slot_spans, [0, *bounds[:-1]], bounds, strict=True)
    ]
    return shared_prefix(anchor, torch.zeros_like(anchor), spans, window, batch.positions.device)


def mask_stream(
    head: DrafterHead, batch: PackedBatch, group: Group, real: RealStream, backend: Backend
) -> Tensor:
    """The residual stream [m, H] of a group's mask slots."""
    assert real.mask_row is not None
    first, last = (batch.num_slots + row for row in group.masks)
    row = real.mask_row
    q, k, v = (t.expand(last - first, -1, -1) for t in (row.q, row.k, row.v))
    cos, sin = head.turns(batch.positions[first:last], row.residual.dtype)
    residual = row.residual.expand(last - first, -1)
    for index, (layer, window) in enumerate(zip(head.blocks, head.config.windows, strict=True)):
        if index:
            x = layer.input_layernorm(residual)
            q, (k, v) = layer.self_attn.queries(x), layer.self_attn.keys_and_values(x)
        q, k = rotate(q, cos, sin).to(v.dtype), rotate(k, cos, sin).to(v.dtype)
        own = k, v, group.chains[window]
        mixed = backend.attend(q, real.keys[index], real.values[index], group.prefixes[index], own)
        residual = layer.finish(residual, mixed)
    return residual


def one_pass(head: DrafterHead, batch: PackedBatch) -> Tensor:
    """The residual stream [E, H] of all supervised elements, as one differentiable computation."""
    backend = backend_for("sdpa")
    real = real_stream(head, batch, backend)
    if batch.num_mask_slots == 0:
        return real.residual
    (group,) = groups_of(head, batch, None)
    return torch.cat([real.residual, mask_stream(head, batch, group, real, backend)])
