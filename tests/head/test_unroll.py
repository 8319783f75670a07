"""EAGLE-3's unroll against the slow reference, in float64, and against the rule as one dense mask."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from peagle_train.head import unroll as unrolling
from peagle_train.head.attention import visible
from peagle_train.head.batch import Document, PackedBatch, pack
from peagle_train.head.config import SLIDING
from peagle_train.head.forward import residuals
from peagle_train.head.model import DrafterHead
from peagle_train.head.prefix import SharedPrefix
from peagle_train.head.reference import reference_loss
from peagle_train.head.unroll import Step, steps_of
from tests.head import test_exactness
from tests.head.test_exactness import DOCUMENTS, assert_same, fast_loss, target_output
from tests.head.toys import CONFIG, EAGLE3, LAYOUTS, toy_document, toy_head

VARIANTS = {
    **LAYOUTS,
    "norm output": dict(norm_output=True),
    "everything": {**LAYOUTS["all at once"], "norm_output": True},
}


def rows_for(changes: dict[str, Any], documents: Sequence[dict[str, Any]] = DOCUMENTS) -> list[Document]:
    return [toy_document(**d, config=replace(CONFIG, **changes)) for d in documents]


@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("layers", [1, 2, 3])
def test_loss_and_gradients_equal_the_reference(layers: int, kind: str) -> None:
    head = toy_head(num_layers=layers, **EAGLE3)
    slow, slow_count = reference_loss(head, rows_for({}), *target_output(), kind=kind)
    fast, fast_count = fast_loss(head, rows_for({}), kind)
    assert fast_count == slow_count > 0
    assert_same(head, fast, slow, 1e-10)


@pytest.mark.parametrize("layout", VARIANTS)
def test_every_layout(layout: str) -> None:
    changes = {**VARIANTS[layout], **EAGLE3}
    head, documents = toy_head(**changes), rows_for(changes, DOCUMENTS[:3])
    slow, _ = reference_loss(head, documents, *target_output())
    assert_same(head, fast_loss(head, documents)[0], slow, 1e-10)


class DenseAttention:
    """The rule, literally, over all elements that were passed so far."""

    def __init__(self, batch: PackedBatch, window: int | None, steps: Sequence[Step]):
        self.batch, self.window, self.depth = batch, window, 0
        self.rows = [torch.arange(batch.num_slots), *(step.rows for step in steps)]
        self.k: list[Tensor] = []
        self.v: list[Tensor] = []

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.k.append(k)
        self.v.append(v)
        mine, all_rows = self.rows[self.depth][:, None], torch.cat(self.rows[: self.depth + 1])[None]
        self.depth += 1
        described = (self.batch.document, self.batch.anchor, self.batch.depth)
        mask = visible(*(t[mine] for t in described), *(t[all_rows] for t in described), self.window)
        group = q.shape[1] // k.shape[1]
        keys, values = (torch.cat(t).repeat_interleave(group, 1) for t in (self.k, self.v))
        scores = torch.einsum("ihd,jhd->hij", q, keys) * q.shape[-1] ** -0.5
        return torch.einsum("hij,jhd->ihd", scores.masked_fill(~mask, float("-inf")).softmax(-1), values)


@pytest.mark.parametrize("changes", [{}, dict(layer_types=(SLIDING, SLIDING), sliding_window=3)])
def test_the_rule_as_a_dense_mask_gives_the_same(changes: dict[str, Any]) -> None:
    head, documents = toy_head(**changes, **EAGLE3), rows_for({})
    dense = fast_loss(head, documents, attention=DenseAttention)[0]
    assert_same(head, fast_loss(head, documents)[0], dense, 1e-10)


def test_packing_adds_up_and_empty_rows_take_no_room() -> None:
    head, documents = toy_head(**EAGLE3), rows_for({})
    empty = replace(documents[0], kept=torch.zeros_like(documents[0].kept))
    together = fast_loss(head, [documents[0], empty, *documents[1:]])
    alone = [fast_loss(head, [d]) for d in documents]
    assert together[1] == sum(c for _, c in alone)
    assert_same(head, together[0], sum((l for l, _ in alone), torch.zeros((), dtype=torch.float64)), 1e-10)


def test_padding_changes_nothing() -> None:
    head, documents = toy_head(**EAGLE3), rows_for({}, DOCUMENTS[:2])
    bare, padded = fast_loss(head, documents), fast_loss(head, documents, pad=64)
    assert padded[1] == bare[1] and torch.isfinite(padded[0])
    assert_same(head, padded[0], bare[0], 1e-12)


def test_only_kept_elements_are_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The passes see the real slots once, then exactly the chains kept beyond each depth."""
    head, documents = toy_head(**EAGLE3), rows_for({})
    seen: list[int] = []
    body = DrafterHead.body

    def counted(self: DrafterHead, embeddings: Tensor, *rest: Any, **options: Any) -> Tensor:
        seen.append(embeddings.shape[0])
        return body(self, embeddings, *rest, **options)

    monkeypatch.setattr(DrafterHead, "body", counted)
    batch = pack(documents)
    residuals(head, batch)
    kept = torch.cat([d.kept for d in documents])
    assert seen == [batch.num_slots, *(int((kept > depth).sum()) for depth in range(1, int(kept.max())))]


def test_one_depth_is_one_pass_and_that_of_peagle() -> None:
    """K = 1: no steps, and the two methods are the same drafter."""
    head, peagle = toy_head(**EAGLE3), toy_head()
    peagle.load_state_dict(head.state_dict(), strict=False)
    document = toy_document(1, positions=1)
    assert steps_of(pack([document])) == ()
    ours, theirs = fast_loss(head, [document])[0], fast_loss(peagle, [document])[0]
    assert torch.allclose(ours, theirs, rtol=1e-12)
    assert torch.allclose(ours, reference_loss(head, [document], *target_output())[0])


def _not_fed_back(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DrafterHead, "next_state", lambda self, residual: torch.zeros_like(residual))


def _fed_back_without_gradient(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DrafterHead, "next_state", lambda self, residual: residual.detach())


def _keys_without_gradient(patch: pytest.MonkeyPatch) -> None:
    longer = unrolling._longer

    def detached(chains: Tensor | None, new: Tensor, step: Step) -> Tensor:
        return longer(None if chains is None else chains.detach(), new, step)

    patch.setattr(unrolling, "_longer", detached)


def _position_stands_still(patch: pytest.MonkeyPatch) -> None:
    packed = pack

    def still(*given: Any, **options: Any) -> PackedBatch:
        batch = packed(*given, **options)
        return replace(batch, positions=batch.positions - batch.depth)

    patch.setattr(test_exactness, "pack", still)


def _prefix_one_too_long(patch: pytest.MonkeyPatch) -> None:
    original = unrolling.shared_prefix

    def leaky(anchor: Tensor, *rest: Any) -> SharedPrefix:
        return original(anchor + 1, *rest)

    patch.setattr(unrolling, "shared_prefix", leaky)


def _embeds_what_it_predicts(patch: pytest.MonkeyPatch) -> None:
    packed = pack

    def shifted(*given: Any, **options: Any) -> PackedBatch:
        batch = packed(*given, **options)
        return replace(batch, step_token_ids=batch.labels[batch.num_supervised - batch.num_mask_slots :])

    patch.setattr(test_exactness, "pack", shifted)


@pytest.mark.parametrize(
    "plant",
    [
        _not_fed_back,
        _fed_back_without_gradient,
        _keys_without_gradient,
        _position_stands_still,
        _prefix_one_too_long,
        _embeds_what_it_predicts,
    ],
)
def test_the_reference_notices(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The equality above can fail, in the loss or in a gradient alone."""
    head, documents = toy_head(**EAGLE3), rows_for({}, DOCUMENTS[:1])
    slow, _ = reference_loss(head, documents, *target_output())
    plant(monkeypatch)
    fast, _ = fast_loss(head, documents)
    with pytest.raises(AssertionError):
        assert_same(head, fast, slow, 1e-6)
