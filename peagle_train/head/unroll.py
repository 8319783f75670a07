"""Training-time test: an eagle3 head over a batch, depth after depth, each fed with its own states.

    depth 0   real slots            embedding of x[a+1]      fused target state h[a]
    depth d   chains kept beyond d  embedding of x[a+1+d]    `next_state` of (a, d-1)

A server embeds the token that (a, d-1) drafted. The unroll embeds the answer's own: a draft counts only if
all before it equalled the answer, so on what counts the two are the same.

Who sees whom is P-EAGLE's rule (`attention.visible`), in every layer: real slots up to the anchor and the
own chain. Keys and values of earlier depths stay, and gradients flow through them and through the states
fed back. K passes instead of one is the price; what a chain does not keep is never computed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise

import torch
from torch import Tensor

from peagle_train.head.attention import Attention
from peagle_train.head.backends import backend_for
from peagle_train.head.batch import PackedBatch
from peagle_train.head.chains import OwnChains
from peagle_train.head.model import DrafterHead
from peagle_train.head.prefix import SharedPrefix, shared_prefix


@dataclass(frozen=True)
class Step:
    """The C elements of one depth, by document and anchor."""

    rows: Tensor  # [C] their rows in the batch, rising
    previous: Tensor  # [C] which element of the depth before each follows
    spans: tuple[tuple[int, int], ...]  # per document: its elements
    anchor: Tensor  # [C] rows of their anchors, on the CPU


def unroll(head: DrafterHead, batch: PackedBatch, attention: Callable[..., Attention]) -> Tensor:
    """The residual stream [E, H] of the batch's supervised elements, in their order.

    Args:
        head: an eagle3 head.
        batch: rows and kept chains.
        attention: makes one layer's attention from (batch, window, steps); `UnrollAttention`.
    """
    steps, slots = steps_of(batch), batch.num_slots
    attentions = [attention(batch, window, steps) for window in head.config.windows]
    embeddings, hidden = head.embed(batch.token_ids, batch.aux, mask_slots=False)
    starts = _starts(batch)
    residual = head.body(embeddings, hidden, batch.positions[:slots], attentions, rows=starts)
    residuals = [residual]
    for step in steps:
        residual = head.body(
            head.embed_tokens(batch.step_token_ids[step.rows - slots]),
            head.next_state(residual[step.previous]),
            batch.positions[step.rows],
            attentions,
        )
        residuals.append(residual)
    by_depth = torch.cat([starts, *(step.rows for step in steps)])
    return torch.cat(residuals)[torch.argsort(by_depth)]


def steps_of(batch: PackedBatch) -> tuple[Step, ...]:
    """The steps of a batch at depths 1, 2, ...; none if every chain ends at depth 0."""
    if batch.num_mask_slots == 0:
        return ()
    slots, documents = batch.num_slots, len(batch.slot_spans)
    depth, document = batch.depth[slots:], batch.document[slots:]
    counts = torch.bincount((depth - 1) * documents + document).tolist()  # by depth, then document
    rows = slots + torch.argsort(depth, stable=True)
    before, steps, taken = _starts(batch), [], 0
    for first in range(0, len(counts), documents):
        sizes = [*counts[first : first + documents], *[0] * (first + documents - len(counts))]
        ends = list(accumulate(sizes, initial=0))
        mine = rows[taken : taken + ends[-1]]
        # The rows of a chain are neighbours; its first one follows the anchor's real slot.
        follows = batch.anchor[mine] if first == 0 else mine - 1
        anchor = batch.chains.anchor[batch.chains.masks > first // documents]
        steps.append(Step(mine, torch.searchsorted(before, follows), tuple(pairwise(ends)), anchor))
        before, taken = mine, taken + ends[-1]
    return tuple(steps)


class UnrollAttention:
    """One layer's attention through an unroll: called for the real slots, then once per step.

    Cost per step and document: (chains) x (slots) for the prefixes, (chains) x (depth) for the chains.
    """

    def __init__(self, batch: PackedBatch, window: int | None, steps: Sequence[Step]):
        self.batch, self.window, self.steps = batch, window, steps
        self.depth, self.backend = 0, backend_for("sdpa")
        self.slot_k: Tensor | None = None  # [Hkv, T, D]
        self.slot_v: Tensor | None = None
        self.chain_k: Tensor | None = None  # [C, depth, Hkv, D], rotated
        self.chain_v: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        depth, self.depth = self.depth, self.depth + 1
        if self.slot_k is None or self.slot_v is None:
            self.slot_k, self.slot_v = k.transpose(0, 1), v.transpose(0, 1)
            return self.backend.real_slots(q, k, v, self.batch.slot_spans, self.window)
        step = self.steps[depth - 1]
        self.chain_k = _longer(self.chain_k, k, step)
        self.chain_v = _longer(self.chain_v, v, step)
        length = depth if self.window is None else min(depth, self.window)
        lengths = torch.full((len(step.rows),), length, device=q.device)
        own = self.chain_k.flatten(0, 1), self.chain_v.flatten(0, 1), OwnChains(depth, lengths, length)
        return self.backend.attend(q, self.slot_k, self.slot_v, self._prefix(step, depth, q.device), own)

    def _prefix(self, step: Step, depth: int, device: torch.device) -> SharedPrefix:
        slots = [first for first, _ in self.batch.slot_spans]
        documents = list(zip(slots, step.spans, strict=True))
        return shared_prefix(step.anchor, torch.full_like(step.anchor, depth), documents, self.window, device)


def _starts(batch: PackedBatch) -> Tensor:
    """The supervised elements of depth 0: rows of the batch, rising."""
    return batch.supervised[: batch.num_supervised - batch.num_mask_slots]


def _longer(chains: Tensor | None, new: Tensor, step: Step) -> Tensor:
    """The chains that go on, [C, depth, ...], with the new element of each at the end."""
    return new[:, None] if chains is None else torch.cat([chains[step.previous], new[:, None]], 1)
