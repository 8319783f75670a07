"""Acceptance from teacher forcing.

A greedy answer of the target is known in advance, so what a server would do can be read off without
serving: draft at every position at once, then walk. (An eagle3 head embeds the answer's tokens where a
server embeds drafted ones: on drafts that count, the same.) At anchor a the drafts are compared with the
answer; m matches mean m + 1 tokens are delivered and the next round starts at anchor a + m + 1. The
walk visits exactly the anchors that the speculative loop would.

Acceptance length = 1 + accepted / drafts: tokens per verification pass of the target.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from peagle_train.head.batch import Document, pack
from peagle_train.head.engine import EngineSettings, best_tokens
from peagle_train.head.model import DrafterHead


@dataclass
class Acceptance:
    """Counts that add up: rounds (num_drafts), and in how many of them position i was accepted."""

    k: int
    num_drafts: int = 0
    accepted_at: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.accepted_at = self.accepted_at or [0] * self.k

    def add_round(self, accepted: int) -> None:
        """One draft of which the first `accepted` tokens held."""
        self.num_drafts += 1
        for i in range(accepted):
            self.accepted_at[i] += 1

    def __iadd__(self, other: Acceptance) -> Acceptance:
        if other.k != self.k:
            raise ValueError(f"acceptance at K = {other.k} cannot be added to K = {self.k}")
        self.num_drafts += other.num_drafts
        self.accepted_at = [a + b for a, b in zip(self.accepted_at, other.accepted_at, strict=True)]
        return self

    @property
    def num_accepted(self) -> int:
        return sum(self.accepted_at)

    @property
    def acceptance_length(self) -> float:
        """1 + accepted / drafts; 1.0 when nothing was drafted."""
        return 1.0 + self.num_accepted / self.num_drafts if self.num_drafts else 1.0

    @property
    def per_position(self) -> list[float]:
        """Share of drafts in which position i was accepted (it and all before it)."""
        return [a / self.num_drafts if self.num_drafts else 0.0 for a in self.accepted_at]


def walk(matches: Tensor, available: Tensor, k: int) -> Acceptance:
    """Walks one document.

    Args:
        matches: [S, K] bool, whether draft d at anchor a equals the answer's token.
        available: [S] int64, how many labels of each chain exist within the turn (0: never an anchor).
        k: drafts per round.
    """
    inside = torch.arange(k) < available[:, None]
    accepted = (matches & inside).long().cumprod(1).sum(1).tolist()
    counts = Acceptance(k)
    anchor, slots = 0, len(accepted)
    anchors = (available > 0).tolist()
    while anchor < slots:
        if not anchors[anchor]:
            anchor += 1
            continue
        counts.add_round(accepted[anchor])
        anchor += accepted[anchor] + 1
    return counts


@torch.no_grad()
def offline_acceptance(
    head: DrafterHead, documents: Sequence[Document], k: int, settings: EngineSettings | None = None
) -> list[Acceptance]:
    """Acceptance of each document.

    Args:
        head: the drafter; it runs where its weights are.
        documents: greedy answers; `kept` must be `sampling.full_depths(..., k)`: every chain is drafted.
        k: drafts per round.
        settings: how the work is cut.
    """
    supervised = [d for d in documents if bool((d.kept > 0).any())]
    results = {id(d): Acceptance(k) for d in documents}
    if supervised:
        device = head.lm_head.weight.device
        batch = pack(supervised).to(device)
        drafts = head.draft_token_ids[best_tokens(head, batch, settings or EngineSettings())]
        hits = (drafts == batch.labels).cpu()
        rows = batch.supervised.cpu()
        document, anchor, depth = (t.cpu()[rows] for t in (batch.document, batch.anchor, batch.depth))
        for index, doc in enumerate(supervised):
            mine = document == index
            matches = torch.zeros(doc.kept.shape[0], k, dtype=torch.bool)
            matches[anchor[mine] - batch.slot_spans[index][0], depth[mine]] = hits[mine]
            results[id(doc)] = walk(matches, doc.kept, k)
    return [results[id(d)] for d in documents]


def total(counts: Iterable[Acceptance], k: int) -> Acceptance:
    """The sum of some counts."""
    result = Acceptance(k)
    for c in counts:
        result += c
    return result
