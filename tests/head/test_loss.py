"""The loss by itself, against plain formulas and autograd."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from peagle_train.head.batch import PackedBatch
from peagle_train.head.loss import LossKind, LossSums, VocabularyLoss, label_rows, total_weight
from tests.head.toys import toy_head

IDS = torch.tensor([1, 4, 5, 9])


def batch_of(labels: Tensor, rows: Tensor, depth: Tensor, target: Tensor) -> PackedBatch:
    """What the loss reads of a batch; `last` holds the target's logits themselves."""
    fields = dict(labels=labels, output_row=rows, depth=depth, last=target)
    return cast(PackedBatch, SimpleNamespace(**fields, supervised=torch.arange(len(labels))))


def take(
    residual: Tensor,
    target: Tensor,
    rows: Tensor,
    labels: Tensor,
    depth: Tensor,
    kind: LossKind = "kl",
    **changes: Any,
) -> tuple[LossSums, Tensor, VocabularyLoss, Any]:
    head = toy_head(dtype=residual.dtype, hidden_size=residual.shape[1], draft_vocab_size=4)
    head.set_draft_tokens(IDS)
    batch = batch_of(labels, rows, depth, target)
    weights = changes.pop("weights", torch.ones(3))
    loss = VocabularyLoss(head, lambda last: last, batch, kind, weights, changes.pop("chunk", 2), True)
    gradient = loss(residual, torch.arange(len(labels)), rows.tolist(), len(target))
    assert gradient is not None
    assert float(total_weight(batch, IDS, kind, weights)) == pytest.approx(float(loss.sums.count))
    return loss.sums, gradient, loss, head


def test_label_rows() -> None:
    assert label_rows(torch.tensor([4, 9, 1, 0, 10, 6]), IDS).tolist() == [1, 3, 0, -1, -1, -1]


@pytest.mark.parametrize("chunk", [1, 2, 9])
@pytest.mark.parametrize("kind", ["kl", "ce"])
def test_loss_and_gradients_are_those_of_the_formula(kind: LossKind, chunk: int) -> None:
    """A label outside the vocabulary is kept by kl and dropped by ce; depths weigh as told."""
    generator = torch.Generator().manual_seed(0)
    residual = torch.randn(4, 6, dtype=torch.float64, generator=generator, requires_grad=True)
    target = torch.randn(3, 4, dtype=torch.float64, generator=generator)
    labels, rows, depth = torch.tensor([4, 7, 9, 1]), torch.tensor([0, 1, 1, 2]), torch.tensor([0, 1, 0, 2])
    weights = torch.tensor([1.0, 2.0, 0.5], dtype=torch.float64)
    sums, gradient, loss, head = take(
        residual.detach(), target, rows, labels, depth, kind, weights=weights, chunk=chunk
    )
    logits = head.logits(residual)
    if kind == "kl":
        p = target[rows].softmax(-1)
        each = (p * (p.log() - logits.log_softmax(-1))).sum(-1)
        counted = torch.ones(4)
    else:
        counted = torch.tensor([1.0, 0.0, 1.0, 1.0])
        each = F.cross_entropy(logits, torch.tensor([1, 0, 3, 0]), reduction="none") * counted
    expected = (each * weights[depth]).sum()
    assert torch.allclose(sums.loss, expected) and torch.allclose(
        sums.count, (weights[depth] * counted).sum()
    )
    parameters = [residual, head.norm.weight, head.lm_head.weight]
    found = [gradient, loss.d_norm, loss.d_lm_head]
    for ours, theirs in zip(found, torch.autograd.grad(expected, parameters), strict=True):
        assert ours is not None and torch.allclose(ours, theirs, atol=1e-12)
    assert sums.elements.tolist() == [2, 1, 1]
    hits = logits.argmax(-1) == torch.tensor([1, -1, 3, 0])
    assert sums.correct.tolist() == [float(hits[depth == d].sum()) for d in range(3)]


def test_kl_is_zero_at_the_target_and_never_negative() -> None:
    residual = torch.randn(5, 6, dtype=torch.float64)
    head = toy_head(hidden_size=6, draft_vocab_size=4)
    same = head.logits(residual).detach()
    rows, depth, labels = torch.arange(5), torch.zeros(5).long(), IDS[[0, 1, 2, 3, 0]]
    assert take(residual, same, rows, labels, depth)[0].loss.abs() < 1e-12
    assert take(residual, torch.randn(5, 4).double(), rows, labels, depth)[0].loss > 0


def test_a_token_that_cannot_occur_adds_nothing() -> None:
    residual, target = torch.randn(1, 6).double(), torch.tensor([[0.0, float("-inf"), 1.0, 2.0]]).double()
    sums, gradient, *_ = take(residual, target, torch.tensor([0]), IDS[:1], torch.tensor([0]))
    assert torch.isfinite(sums.loss) and torch.isfinite(gradient).all()


def test_bfloat16_logits_are_summed_in_float32() -> None:
    residual = torch.randn(64, 6).bfloat16()
    head = toy_head(hidden_size=6, draft_vocab_size=4, dtype=torch.bfloat16)
    same = head.logits(residual).detach()
    rows, depth = torch.arange(64), torch.zeros(64).long()
    sums, *_ = take(residual, same, rows, IDS[depth], depth)
    assert sums.loss.dtype == torch.float32 and sums.loss.abs() < 1e-4
