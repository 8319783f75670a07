"""Rows and their kept chains, packed into the tensors of one step.

Documents lie one after the other without padding between them:

    [ slots of doc 0 | slots of doc 1 | ... | padding ] [ mask slots by doc, anchor, depth ]
      T rows                                              M rows

A document's slots end at its last anchor that carries loss: later ones would be seen by nobody.
Every mask slot carries loss, by construction of the sampling. For an eagle3 head the same M rows are the
steps of its unroll: positions, labels and who sees whom are those of the mask slots.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import Tensor

from peagle_train.head.alignment import EMBEDDED, PREDICTED, TARGET_OUTPUT


@dataclass(frozen=True)
class Document:
    """One row of data as the head sees it.

    token_ids [n] int64, aux [S, A*TH] (the target's states after the first S tokens, S at least up to the
    last anchor that is kept), last [P, TH] (those after the tokens at the positions `last_at` [P] int64,
    rising, before the final norm; None: after the first P tokens), kept [n-1] int64 (elements kept per
    anchor).
    """

    token_ids: Tensor
    aux: Tensor
    last: Tensor
    kept: Tensor
    last_at: Tensor | None = None

    def outputs(self, positions: Tensor) -> Tensor:
        """[N, TH], rows of `last` at some positions [N]. Raises ValueError if one of them is not there."""
        if self.last_at is None:
            return self.last[positions]
        rows = torch.searchsorted(self.last_at, positions)
        there = self.last_at[rows.clamp(max=len(self.last_at) - 1)] if len(self.last_at) else rows - 1
        if not torch.equal(there, positions):
            missing = positions[there != positions].tolist()
            raise ValueError(f"`last` has no state of the positions {missing}, which kept elements need")
        return self.last[rows]


@dataclass(frozen=True)
class ChainTable:
    """What must be known of a batch to plan its work; always on the CPU, so planning never waits for a GPU.

    anchor [A] row of each trained chain's real slot, rising; masks [A] mask slots that follow it;
    output_row [E] as in the batch.
    """

    anchor: Tensor
    masks: Tensor
    output_row: Tensor


@dataclass(frozen=True)
class PackedBatch:
    """The tensors of one step. T real slots, M mask slots, E supervised elements, P target outputs.

    The elements are the A real slots that carry loss, then all mask slots.
    """

    token_ids: Tensor  # [T] embedded by each real slot
    step_token_ids: Tensor  # [M] x[a + d + 1]: embedded by eagle3's steps, unused by peagle
    aux: Tensor  # [T, A*TH]
    positions: Tensor  # [T + M] RoPE positions
    document: Tensor  # [T + M] document of each row; -1 for padding
    anchor: Tensor  # [T + M] row of the anchor; a real slot is its own
    depth: Tensor  # [T + M] 0 for real slots
    supervised: Tensor  # [E] rows that carry loss, ordered by row
    labels: Tensor  # [E] target token ids
    last: Tensor  # [P, TH] target states, each of which gives some element its label's distribution
    output_row: Tensor  # [E] row of `last` for each supervised element
    slot_spans: tuple[tuple[int, int], ...]  # per document: its real slots
    mask_spans: tuple[tuple[int, int], ...]  # per document: its mask slots, counted from 0 within the M
    chains: ChainTable

    @property
    def num_slots(self) -> int:
        return self.token_ids.shape[0]

    @property
    def num_mask_slots(self) -> int:
        return self.positions.shape[0] - self.num_slots

    @property
    def num_supervised(self) -> int:
        return self.supervised.shape[0]

    def to(self, device: torch.device | str) -> PackedBatch:
        """The batch on another device."""
        values: dict[str, Any] = {f.name: getattr(self, f.name) for f in fields(self)}
        values = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in values.items()}
        return PackedBatch(**values)


def pack(documents: Sequence[Document], pad_slots_to: int | None = None) -> PackedBatch:
    """Packs documents into one batch.

    Args:
        documents: at least one; those that keep nothing take no room.
        pad_slots_to: pad the real slots to this many rows (fixed shapes); padding sees itself alone,
            is seen by nobody and carries no loss.

    Raises:
        ValueError: nothing is supervised, the padding is too small, or a state that is needed is missing.
    """
    token_ids, step_token_ids, aux, slot_positions, slot_document, depth0 = [], [], [], [], [], []
    mask_positions, mask_document, mask_anchor, mask_depth = [], [], [], []
    slot_labels, mask_labels, slot_outputs, mask_outputs, last = [], [], [], [], []
    slot_spans, mask_spans, chain_masks = [], [], []
    slots = masks = outputs = 0
    for index, doc in enumerate(documents):
        anchors = torch.nonzero(doc.kept)[:, 0]
        if anchors.numel() == 0:
            slot_spans.append((slots, slots))
            mask_spans.append((masks, masks))
            continue
        length = int(anchors[-1]) + 1
        if doc.aux.shape[0] < length:
            raise ValueError(f"aux has {doc.aux.shape[0]} states, expected {length}: up to the last anchor")
        # The mask slots of each anchor: kept - 1 of them, at depths 1, 2, ...
        extra = (doc.kept[anchors] - 1).clamp(min=0)
        owner = torch.repeat_interleave(anchors, extra)
        starts = torch.repeat_interleave(torch.cumsum(extra, 0) - extra, extra)
        deep = torch.arange(owner.shape[0]) - starts + 1

        token_ids.append(doc.token_ids[EMBEDDED : EMBEDDED + length])
        step_token_ids.append(doc.token_ids[owner + deep + EMBEDDED])
        aux.append(doc.aux[:length])
        slot_positions.append(torch.arange(length))
        slot_document.append(torch.full((length,), index))
        depth0.append(slots + anchors)
        chain_masks.append(extra)
        mask_positions.append(owner + deep)
        mask_document.append(torch.full_like(owner, index))
        mask_anchor.append(slots + owner)
        mask_depth.append(deep)

        # Each target output once for all depths that share it, and none that no element needs.
        needed, row = torch.unique(torch.cat([anchors, owner + deep]), return_inverse=True)
        last.append(doc.outputs(needed + TARGET_OUTPUT))
        slot_labels.append(doc.token_ids[anchors + PREDICTED])
        mask_labels.append(doc.token_ids[owner + deep + PREDICTED])
        slot_outputs.append(outputs + row[: len(anchors)])
        mask_outputs.append(outputs + row[len(anchors) :])

        slot_spans.append((slots, slots + length))
        mask_spans.append((masks, masks + owner.shape[0]))
        slots, masks, outputs = slots + length, masks + owner.shape[0], outputs + len(needed)
    if slots == 0:
        raise ValueError(
            "no document of the batch has a supervised element; such rows are left out beforehand"
        )

    padding = 0 if pad_slots_to is None else pad_slots_to - slots
    if padding < 0:
        raise ValueError(f"{slots} slots do not fit into pad_slots_to = {pad_slots_to}")
    if padding:
        token_ids.append(torch.zeros(padding, dtype=torch.int64))
        aux.append(torch.zeros(padding, aux[0].shape[1], dtype=aux[0].dtype))
        slot_positions.append(torch.zeros(padding, dtype=torch.int64))
        slot_document.append(torch.full((padding,), -1))
    total = slots + padding
    chain_anchor, output_row = torch.cat(depth0), torch.cat(slot_outputs + mask_outputs)
    return PackedBatch(
        token_ids=torch.cat(token_ids),
        step_token_ids=torch.cat(step_token_ids),
        aux=torch.cat(aux),
        positions=torch.cat(slot_positions + mask_positions),
        document=torch.cat(slot_document + mask_document),
        anchor=torch.cat([torch.arange(total), *mask_anchor]),
        depth=torch.cat([torch.zeros(total, dtype=torch.int64), *mask_depth]),
        supervised=torch.cat([chain_anchor, total + torch.arange(masks)]),
        labels=torch.cat(slot_labels + mask_labels),
        last=torch.cat(last),
        output_row=output_row,
        slot_spans=tuple(slot_spans),
        mask_spans=tuple(mask_spans),
        chains=ChainTable(chain_anchor, torch.cat(chain_masks), output_row),
    )
