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


@dataclass(frozen=True)
class Round:
    """One draft of the walk: the anchor it starts from, and how many of its tokens held."""

    anchor: int
    accepted: int


@dataclass(frozen=True)
class Matches:
    """Of one document, what every possible draft would have got right: all that any K up to this one needs.

    hits: [S, K] bool, whether the draft for depth d at anchor a equals the answer's token.
    available: [S] int64, how many labels of each chain exist within the turn (0: never an anchor).
    """

    hits: Tensor
    available: Tensor

    @property
    def k(self) -> int:
        """The most drafts a round can have."""
        return self.hits.shape[1]

    def rounds(self, k: int) -> list[Round]:
        """The drafts of a server with K = k: of what was drafted, the first k tokens. O(S)."""
        if not 1 <= k <= self.k:
            raise ValueError(f"K = {k}; drafted were {self.k} tokens")
        inside = torch.arange(k) < self.available[:, None]
        accepted = (self.hits[:, :k] & inside).long().cumprod(1).sum(1).tolist()
        anchors = (self.available > 0).tolist()
        found, anchor = [], 0
        while anchor < len(accepted):
            if not anchors[anchor]:
                anchor += 1
                continue
            found.append(Round(anchor, accepted[anchor]))
            anchor += accepted[anchor] + 1
        return found

    def acceptance(self, k: int) -> Acceptance:
        """The counts of those rounds."""
        counts = Acceptance(k)
        for one in self.rounds(k):
            counts.add_round(one.accepted)
        return counts


@torch.no_grad()
def offline_matches(
    head: DrafterHead, documents: Sequence[Document], k: int, settings: EngineSettings | None = None
) -> list[Matches]:
    """What a head's drafts are worth at every place of each document, in one teacher-forced pass.

    Args:
        head: the drafter; it runs where its weights are.
        documents: greedy answers; `kept` must be `sampling.full_depths(..., k)`: every chain is drafted.
        k: drafts per round, at most.
        settings: how the work is cut.
    """
    found = {id(d): Matches(torch.zeros(d.kept.shape[0], k, dtype=torch.bool), d.kept) for d in documents}
    supervised = [d for d in documents if bool((d.kept > 0).any())]
    if supervised:
        device = head.lm_head.weight.device
        batch = pack(supervised).to(device)
        drafts = head.draft_token_ids[best_tokens(head, batch, settings or EngineSettings())]
        hits = (drafts == batch.labels).cpu()
        rows = batch.supervised.cpu()
        document, anchor, depth = (t.cpu()[rows] for t in (batch.document, batch.anchor, batch.depth))
        for index, doc in enumerate(supervised):
            mine = document == index
            found[id(doc)].hits[anchor[mine] - batch.slot_spans[index][0], depth[mine]] = hits[mine]
    return [found[id(d)] for d in documents]


def offline_acceptance(
    head: DrafterHead, documents: Sequence[Document], k: int, settings: EngineSettings | None = None
) -> list[Acceptance]:
    """Acceptance of each document at K = k. As `offline_matches`."""
    return [matches.acceptance(k) for matches in offline_matches(head, documents, k, settings)]


def total(counts: Iterable[Acceptance], k: int) -> Acceptance:
    """The sum of some counts."""
    result = Acceptance(k)
    for c in counts:
        result += c
    return result
