"""The loss by itself."""

from __future__ import annotations

import torch

from peagle_train.head.loss import draft_loss, label_rows

IDS = torch.tensor([1, 4, 5, 9])


def test_label_rows() -> None:
    assert label_rows(torch.tensor([4, 9, 1, 0, 10, 6]), IDS).tolist() == [1, 3, 0, -1, -1, -1]


def test_kl_keeps_labels_outside_the_vocabulary_and_ce_drops_them() -> None:
    logits = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    target = torch.randn(2, 4, dtype=torch.float64)
    labels, depth, rows = torch.tensor([4, 7, 9]), torch.tensor([0, 0, 1]), torch.tensor([0, 1, 1])
    kl = draft_loss(logits, target, rows, labels, IDS, depth, 2, "kl")
    ce = draft_loss(logits, target, rows, labels, IDS, depth, 2, "ce")
    assert int(kl.count) == 3 and int(ce.count) == 2
    p, q = target[rows].softmax(-1), logits.softmax(-1)
    assert torch.allclose(kl.loss, (p * (p / q).log()).sum())
    assert torch.allclose(ce.loss, -(q[0, 1].log() + q[2, 3].log()))
    assert kl.elements.tolist() == [2, 1]


def test_kl_is_zero_at_the_target_and_never_negative() -> None:
    target = torch.randn(5, 4, dtype=torch.float64) * 10
    same = draft_loss(
        target.clone(), target, torch.arange(5), IDS[[0, 1, 2, 3, 0]], IDS, torch.zeros(5).long(), 1
    )
    assert same.loss.abs() < 1e-12
    other = draft_loss(
        torch.randn(5, 4), target, torch.arange(5), IDS[[0, 1, 2, 3, 0]], IDS, torch.zeros(5).long(), 1
    )
    assert other.loss > 0


def test_bfloat16_logits_are_summed_in_float32() -> None:
    logits = torch.randn(64, 4).bfloat16()
    sums = draft_loss(
        logits, logits, torch.arange(64), IDS[torch.zeros(64).long()], IDS, torch.zeros(64).long(), 1
    )
    assert sums.loss.dtype == torch.float32 and sums.loss.abs() < 1e-5


def test_accuracy_by_depth() -> None:
    logits = torch.eye(4)[[0, 1, 2]]
    sums = draft_loss(
        logits, torch.zeros(3, 4), torch.arange(3), torch.tensor([1, 4, 9]), IDS, torch.tensor([0, 1, 1]), 3
    )
    assert sums.correct.tolist() == [1, 1, 0] and sums.elements.tolist() == [1, 2, 0]
