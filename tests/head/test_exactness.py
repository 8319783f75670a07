"""The fast path against the slow reference, in float64: loss and every gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from peagle_train.head import streams
from peagle_train.head.attention import RuleAttention
from peagle_train.head.batch import Document, pack
from peagle_train.head.engine import EngineSettings, deliver, loss_and_gradients, trained_parameters
from peagle_train.head.forward import residuals
from peagle_train.head.loss import LossKind, VocabularyLoss
from peagle_train.head.model import DrafterHead
from peagle_train.head.prefix import SharedPrefix
from peagle_train.head.reference import reference_loss
from tests.head.toys import CONFIG, LAYOUTS, toy_document, toy_head

POSITIONS = 4
DEFAULT = EngineSettings()


def target_output(seed: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(
        CONFIG.vocab_size, CONFIG.target_hidden_size, generator=generator, dtype=torch.float64
    )
    norm = 1 + 0.2 * torch.randn(CONFIG.target_hidden_size, generator=generator, dtype=torch.float64)
    return weight, norm


def fast_loss(
    head: DrafterHead,
    documents: list[Document],
    kind: LossKind = "kl",
    attention: type | None = None,
    pad: int | None = None,
    settings: EngineSettings = DEFAULT,
    weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, int]:
    """The engine's loss, with its gradients behind it; with `attention`, the plain forward's."""
    batch = pack(documents, pad_slots_to=pad)
    weight, norm = target_output()
    weight, norm = weight.to(head.fc.weight.dtype), norm.to(head.fc.weight.dtype)
    batch = replace(batch, last=batch.last.to(weight.dtype))
    weights = torch.ones(POSITIONS) if weights is None else weights

    def output(last: torch.Tensor) -> torch.Tensor:
        normed = last * (last.square().mean(-1, keepdim=True) + head.config.rms_norm_eps).rsqrt() * norm
        return normed @ weight[head.draft_token_ids].T

    if attention is not None:
        residual = residuals(head, batch, attention)
        loss = VocabularyLoss(head, output, batch, kind, weights, 7, True)
        order = torch.argsort(batch.output_row)
        found = loss(residual[order].detach(), order, batch.output_row[order].tolist(), 0)
        assert found is not None
        plain = torch.empty_like(found)
        plain[order] = found
        # The same loss for autograd: linear in `residual`, and in the two parameters, with those gradients.
        parts = [(residual, plain), (head.norm.weight, loss.d_norm), (head.lm_head.weight, loss.d_lm_head)]
        value = sum(((x - x.detach()) * d).sum() for x, d in parts if d is not None)
        return loss.sums.loss + value, int(loss.sums.count)
    sums, found_gradients = loss_and_gradients(
        head, output, batch, kind=kind, weights=weights, settings=settings
    )
    return deliver(sums.loss, trained_parameters(head), found_gradients), int(sums.count)


def gradients(head: DrafterHead, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    names = [n for n, p in head.named_parameters() if p.requires_grad]
    values = torch.autograd.grad(loss, [p for p in head.parameters() if p.requires_grad], retain_graph=True)
    return dict(zip(names, values, strict=True))


def assert_same(head: DrafterHead, ours: torch.Tensor, theirs: torch.Tensor, tolerance: float) -> None:
    assert torch.allclose(ours, theirs, rtol=tolerance, atol=tolerance), (ours.item(), theirs.item())
    mine, reference = gradients(head, ours), gradients(head, theirs)
    for name, gradient in reference.items():
        scale = gradient.abs().max().clamp(min=1.0)
        assert (mine[name] - gradient).abs().max() <= tolerance * scale, name


DOCUMENTS = [
    dict(seed=1, length=14, turns=((5, 14),)),
    dict(seed=2, length=9, turns=((3, 8),)),
    dict(seed=3, length=16, turns=((2, 7), (9, 16))),
    dict(seed=4, length=6, turns=((4, 6),)),
]


@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_loss_and_gradients_equal_the_reference(layers: int, kind: str) -> None:
    head = toy_head(num_layers=layers)
    documents = [toy_document(**d) for d in DOCUMENTS]  # type: ignore[arg-type]
    slow, slow_count = reference_loss(head, documents, *target_output(), kind=kind)
    fast, fast_count = fast_loss(head, documents, kind)
    assert fast_count == slow_count > 0
    assert_same(head, fast, slow, 1e-10)


def test_the_dense_mask_of_the_rule_gives_the_same() -> None:
    head = toy_head()
    documents = [toy_document(**d) for d in DOCUMENTS]  # type: ignore[arg-type]
    assert_same(
        head, fast_loss(head, documents)[0], fast_loss(head, documents, attention=RuleAttention)[0], 1e-10
    )


@pytest.mark.parametrize("attention", [None, RuleAttention])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_every_layout(layout: str, attention: type | None) -> None:
    changes: dict = LAYOUTS[layout]
    head = toy_head(**changes)
    documents = [toy_document(**d, config=replace(CONFIG, **changes)) for d in DOCUMENTS[:3]]  # type: ignore[arg-type]
    slow, _ = reference_loss(head, documents, *target_output())
    assert_same(head, fast_loss(head, documents, attention=attention)[0], slow, 1e-10)


SHAPE = {"hidden_size", "aux_layers", "draft_vocab_size", "own_embeddings", "num_layers"}
"""What the tensors' shapes tell; the rest of a layout is arithmetic, which could be forgotten."""


@pytest.mark.parametrize("layout", [name for name, changes in LAYOUTS.items() if not set(changes) <= SHAPE])
def test_every_option_changes_the_loss(layout: str) -> None:
    """An option that neither path read would pass the equality above."""
    changes = dict(LAYOUTS[layout])
    head = toy_head(**changes)
    plain = toy_head(**{k: v for k, v in changes.items() if k in SHAPE})
    plain.load_state_dict(head.state_dict(), strict=False)
    documents = [toy_document(**d, config=replace(CONFIG, **changes)) for d in DOCUMENTS[:3]]  # type: ignore[arg-type]
    assert abs(fast_loss(head, documents)[0].item() - fast_loss(plain, documents)[0].item()) > 1e-3


def test_packing_adds_up() -> None:
    """One batch of all documents equals the documents one by one: nothing leaks between them."""
    head = toy_head()
    documents = [toy_document(**d) for d in DOCUMENTS]  # type: ignore[arg-type]
    together = fast_loss(head, documents)
    alone = [fast_loss(head, [d]) for d in documents]
    assert together[1] == sum(c for _, c in alone)
    assert_same(head, together[0], sum((l for l, _ in alone), torch.zeros((), dtype=torch.float64)), 1e-10)


@pytest.mark.parametrize("attention", [None, RuleAttention])
def test_padding_changes_nothing(attention: type | None) -> None:
    head = toy_head()
    documents = [toy_document(**DOCUMENTS[0])]  # type: ignore[arg-type]
    for pad in (64, 256):
        bare = fast_loss(head, documents, attention=attention)
        padded = fast_loss(head, documents, attention=attention, pad=pad)
        assert padded[1] == bare[1]
        assert torch.isfinite(padded[0])
        assert_same(head, padded[0], bare[0], 1e-12)


def test_float32_stays_close() -> None:
    documents = [toy_document(**d) for d in DOCUMENTS]  # type: ignore[arg-type]
    slow, _ = reference_loss(toy_head(), documents, *target_output())
    fast, _ = fast_loss(toy_head(dtype=torch.float32), documents)
    assert abs(fast.item() - slow.item()) < 1e-5 * abs(slow.item()) + 1e-4


def test_without_mask_slots() -> None:
    """K = 1: the head is a plain EAGLE drafter and mask_hidden learns nothing."""
    head = toy_head()
    document = toy_document(1, positions=1)
    slow, _ = reference_loss(head, [document], *target_output())
    fast, _ = fast_loss(head, [document])
    assert torch.allclose(fast, slow)
    (gradient,) = torch.autograd.grad(fast, head.mask_hidden)
    assert not gradient.any()


def test_a_batch_without_supervision_is_an_error() -> None:
    with pytest.raises(ValueError, match="no document"):
        pack([toy_document(1, turns=())])


def test_the_reference_notices_a_broken_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """The equality above can fail: let mask slots see one slot past their anchor."""
    head = toy_head()
    documents = [toy_document(**DOCUMENTS[0])]  # type: ignore[arg-type]
    slow, _ = reference_loss(head, documents, *target_output())
    original = streams.shared_prefix

    def leaky(anchor: torch.Tensor, depth: torch.Tensor, *rest: Any) -> SharedPrefix:
        return original(anchor + depth.clamp(max=1), depth, *rest)

    monkeypatch.setattr(streams, "shared_prefix", leaky)
    assert abs(fast_loss(head, documents)[0].item() - slow.item()) > 1e-6
