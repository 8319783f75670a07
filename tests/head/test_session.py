"""Cached drafting computes what training trains."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch

from peagle_train.head.acceptance import Acceptance, Matches, Round, offline_acceptance, offline_matches
from peagle_train.head.alignment import trainable_depths
from peagle_train.head.batch import Document, pack
from peagle_train.head.forward import residuals
from peagle_train.head.model import DrafterHead
from peagle_train.head.sampling import full_depths
from peagle_train.head.session import DraftSession
from tests.head.toys import CONFIG, EAGLE3, LAYOUTS, toy_document, toy_head

K = 4


def row(seed: int = 5, **changes: Any) -> Document:
    document = toy_document(seed, length=20, turns=((6, 20),), config=replace(CONFIG, **changes))
    mask = torch.zeros(20, dtype=torch.bool)
    mask[6:] = True
    return Document(document.token_ids, document.aux, document.last, full_depths(trainable_depths(mask), K))


def drafted_at_every_anchor(
    head: DrafterHead, document: Document
) -> Iterator[tuple[int, torch.Tensor, torch.Tensor]]:
    """Anchor, drafts and logits of one session over the answer, fed two slots at once now and then."""
    session, fed = DraftSession(head), 0
    for anchor in range(5, 18):
        if anchor % 3 == 0:
            continue
        drafts, logits = session.draft(
            document.token_ids[fed + 1 : anchor + 2], document.aux[fed : anchor + 1], K
        )
        fed = anchor + 1
        yield anchor, drafts, logits


@pytest.mark.parametrize("layout", LAYOUTS)
def test_session_logits_equal_the_training_forward_at_every_anchor(layout: str) -> None:
    head, document = toy_head(**LAYOUTS[layout]), row(**LAYOUTS[layout])
    batch = pack([document])
    trained = head.logits(residuals(head, batch))
    where = {
        (int(batch.anchor[r]), int(batch.depth[r])): trained[i]
        for i, r in enumerate(batch.supervised.tolist())
    }
    for anchor, drafts, logits in drafted_at_every_anchor(head, document):
        for depth in range(min(K, int(document.kept[anchor]))):
            assert torch.allclose(logits[depth], where[anchor, depth], atol=1e-10), (anchor, depth)
            assert drafts[depth] == head.draft_token_ids[where[anchor, depth].argmax()]


@pytest.mark.parametrize("layout", [*LAYOUTS, "norm output"])
def test_an_eagle3_session_is_the_unroll_over_its_own_drafts(layout: str) -> None:
    """At every anchor: an answer that reads as drafted gives the drafts' logits, teacher-forced."""
    changes = {**LAYOUTS.get(layout, dict(norm_output=True)), **EAGLE3}
    head, document = toy_head(**changes), row(**changes)
    answers, drafted = [], []
    for anchor, drafts, logits in drafted_at_every_anchor(head, document):
        token_ids, kept = document.token_ids.clone(), torch.zeros_like(document.kept)
        kept[anchor] = min(K, document.token_ids.shape[0] - anchor - 2)
        token_ids[anchor + 2 : anchor + 2 + K] = drafts[: int(kept[anchor])]
        answers.append(Document(token_ids, document.aux, document.last, kept))
        drafted.append((anchor, logits))
    batch = pack(answers)
    unrolled = head.logits(residuals(head, batch))
    rows = batch.supervised
    for index, (anchor, logits) in enumerate(drafted):
        mine = unrolled[(batch.document[rows] == index).nonzero()[:, 0]]
        assert mine.shape[0] == min(K, 18 - anchor)
        assert torch.allclose(logits[: mine.shape[0]], mine, atol=1e-10), anchor


@pytest.mark.parametrize("changes", [{}, EAGLE3])
def test_drafting_leaves_nothing_in_the_cache(changes: dict[str, Any]) -> None:
    head, document = toy_head(**changes), row()
    with_drafts, without = DraftSession(head), DraftSession(head)
    with_drafts.draft(document.token_ids[1:8], document.aux[:7], K)
    without.draft(document.token_ids[1:8], document.aux[:7], 1)
    for a, b in zip(with_drafts.layers, without.layers, strict=True):
        assert a.k is not None and b.k is not None and a.k.shape[0] == 7
        assert torch.allclose(a.k, b.k)


def test_walk_jumps_by_accepted_plus_one() -> None:
    matches = torch.tensor([[1, 1, 0], [0, 0, 0], [1, 1, 1], [0, 1, 1], [1, 1, 1], [1, 0, 0]]).bool()
    counts = Matches(matches, torch.tensor([0, 3, 3, 3, 2, 1])).acceptance(3)
    # anchor 1 accepts 0; 2 accepts 3; 2 + 3 + 1 = 6 is past the end
    assert (counts.num_drafts, counts.accepted_at) == (2, [1, 1, 1])
    counts = Matches(matches, torch.tensor([3, 3, 0, 0, 2, 1])).acceptance(3)
    # anchor 0 accepts 2 -> anchor 3 is no anchor -> the next turn begins at 4, accepts 2 of 2
    assert (counts.num_drafts, counts.accepted_at) == (2, [2, 2, 0])
    assert counts.acceptance_length == 3.0 and counts.per_position == [1.0, 1.0, 0.0]


@pytest.mark.parametrize("changes", [{}, EAGLE3])
def test_offline_equals_stepping_through_the_answer(changes: dict[str, Any]) -> None:
    """Draft, compare with the answer, jump: counts the same as one teacher-forced walk over all of it.

    A random head is hardly ever right: the answers are what it drafts itself, with some tokens replaced.
    """
    head = toy_head(draft_vocab_size=40, **changes)
    documents = [_half_drafted(head, row(seed)) for seed in range(4)]
    offline = offline_acceptance(head, documents, K)
    for document, counted in zip(documents, offline, strict=True):
        stepped, session, fed, anchor = Acceptance(K), DraftSession(head), 0, 5
        while anchor <= 17:  # x[anchor + 2] exists
            drafts, _ = session.draft(
                document.token_ids[fed + 1 : anchor + 2], document.aux[fed : anchor + 1], K
            )
            answer = document.token_ids[anchor + 2 : anchor + 2 + K].tolist()
            accepted = 0
            while accepted < len(answer) and drafts[accepted] == answer[accepted]:
                accepted += 1
            stepped.add_round(accepted)
            fed, anchor = anchor + 1, anchor + accepted + 1
        assert (counted.num_drafts, counted.accepted_at) == (stepped.num_drafts, stepped.accepted_at)
    assert sum(counted.accepted_at[-1] for counted in offline) > 0
    assert any(counted.num_accepted < K * counted.num_drafts for counted in offline)


@pytest.mark.parametrize("changes", [{}, EAGLE3])
def test_one_pass_holds_every_smaller_k(changes: dict[str, Any]) -> None:
    """A server with K = k drafts what one with more does, and stops sooner: rounds differ, tokens do not."""
    head = toy_head(draft_vocab_size=40, **changes)
    documents = [_half_drafted(head, row(seed)) for seed in range(4)]
    for k in range(1, K + 1):
        shallow = [replace(d, kept=d.kept.clamp(max=k)) for d in documents]
        once = [matches.acceptance(k) for matches in offline_matches(head, documents, K)]
        assert once == offline_acceptance(head, shallow, k)
    assert all(0 < one.accepted_at[-1] < one.num_drafts for one in once)
    (matches, *_) = offline_matches(head, documents, K)
    first, *rest = matches.rounds(2)
    assert first == Round(5, 2) and rest[0].anchor == 8
    with pytest.raises(ValueError, match=f"drafted were {K}"):
        matches.rounds(K + 1)


def _half_drafted(head: DrafterHead, document: Document) -> Document:
    """The row with an answer of K, K - 1, K, ... drafted tokens, one random token behind each run."""
    token_ids, session, fed, anchor, right = document.token_ids.clone(), DraftSession(head), 0, 5, K
    while anchor + 2 < token_ids.shape[0]:
        drafts, _ = session.draft(token_ids[fed + 1 : anchor + 2], document.aux[fed : anchor + 1], K)
        room = token_ids[anchor + 2 : anchor + 2 + right]
        room.copy_(drafts[: room.shape[0]])
        fed, anchor, right = anchor + 1, anchor + right + 1, 2 * K - 1 - right
    return replace(document, token_ids=token_ids)


def test_a_head_that_knows_the_answer_is_accepted_whole() -> None:
    """Sanity of the scale: labels as drafts give the longest acceptance there is."""
    available = full_depths(trainable_depths(torch.tensor([False] * 3 + [True] * 12)), K)
    counts = Matches(torch.ones(14, K, dtype=torch.bool), available).acceptance(K)
    # 11 tokens after the first, in rounds of K + 1 = 5: 5, 5, 1
    assert (counts.num_drafts, counts.num_accepted) == (3, 4 + 4 + 1)
