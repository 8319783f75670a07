"""However a batch is cut, the engine's loss and gradients are those of the flat reference."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from peagle_train.head import engine as engine_module
from peagle_train.head import matmul, prefix, streams
from peagle_train.head.alike import Alike
from peagle_train.head.attention import RuleAttention
from peagle_train.head.batch import Document, pack
from peagle_train.head.config import FULL, SLIDING
from peagle_train.head.engine import EngineSettings, best_tokens, deliver
from peagle_train.head.forward import residuals
from peagle_train.head.kernels import Chosen, FusedCPU, Kernel, Tiled
from peagle_train.head.loss import VocabularyLoss, depth_weights
from peagle_train.head.model import DrafterHead
from peagle_train.head.reference import reference_loss
from peagle_train.head.streams import groups_of
from tests.head.test_exactness import DOCUMENTS, assert_same, fast_loss, gradients, target_output
from tests.head.toys import CONFIG, EAGLE3, toy_document, toy_head

LONG = [
    dict(seed=11, length=60, turns=((9, 30), (33, 60))),
    dict(seed=12, length=7, turns=((3, 7),)),
    dict(seed=13, length=41, turns=((20, 41),)),
]


@cache
def reference() -> tuple[DrafterHead, list[Document], Tensor, int]:
    head, documents = toy_head(), [toy_document(**d) for d in DOCUMENTS]  # type: ignore[arg-type]
    return head, documents, *reference_loss(head, documents, *target_output())


WIDTHS, LOSS_ROWS, GROUP_ROWS = (1, 3, 128), (1, 5, 1000), (1, 2, 7, 20, None)
# Every pair of two of the three, not every triple.
CUTS = [(rows, LOSS_ROWS[i], WIDTHS[(i + j) % 3]) for j, rows in enumerate(GROUP_ROWS) for i in range(3)]


@pytest.mark.parametrize(("group_rows", "loss_rows", "width"), CUTS)
def test_any_cut_equals_the_reference(
    group_rows: int | None, loss_rows: int, width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(prefix.WIDTH, "cpu", width)
    head, documents, slow, count = reference()
    fast, fast_count = fast_loss(head, documents, settings=EngineSettings(group_rows, loss_rows))
    assert fast_count == count
    assert_same(head, fast, slow, 1e-10)


@pytest.mark.parametrize("kernel", [Tiled, FusedCPU])
@pytest.mark.parametrize(
    ("window", "types"),
    [
        (None, ()),
        (2, (SLIDING, FULL, SLIDING)),
        (9, (FULL, SLIDING, SLIDING)),
        (9, (SLIDING, SLIDING, FULL)),
        (17, (SLIDING, FULL, SLIDING)),
    ],
)
@pytest.mark.parametrize("group_rows", [9, None])
def test_long_documents_windows_and_kernels(
    group_rows: int | None,
    window: int | None,
    types: tuple[str, ...],
    kernel: type[Kernel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Clear parts, two edges and rows that see no edge key at all, against the dense mask of the rule."""
    monkeypatch.setitem(prefix.WIDTH, "cpu", 4)
    monkeypatch.setattr("peagle_train.head.backends.kernel_for", lambda *given: Chosen(kernel(), ()))
    head = toy_head(num_layers=3, layer_types=types, sliding_window=window)
    documents = [toy_document(**d, positions=7, rate=0.9) for d in LONG]  # type: ignore[arg-type]
    weights = torch.linspace(1, 2, 7, dtype=torch.float64)
    fast, _ = fast_loss(head, documents, settings=EngineSettings(group_rows, 11), weights=weights)
    slow, _ = fast_loss(head, documents, attention=RuleAttention, weights=weights)
    assert_same(head, fast, slow, 1e-10)


def test_in_layer_0_a_position_asks_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mask slots of one document and position in a block: one query of the kernel in layer 0."""
    monkeypatch.setitem(prefix.WIDTH, "cpu", 8)
    asked: list[int] = []

    class Watched(Tiled):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
            asked.append(q.shape[1])
            return super().forward(q, k, v)

    monkeypatch.setattr("peagle_train.head.backends.kernel_for", lambda *given: Chosen(Watched(), ()))
    head, batch = toy_head(num_layers=2), pack([toy_document(11, length=60, positions=6, rate=0.9)])
    (group,) = groups_of(head, batch, None)
    backend = engine_module.backend_for("sdpa")
    real = streams.real_stream(head, batch, backend)
    asked.clear()
    streams.mask_stream(head, batch, group, real, backend)
    blocks = [b for b in group.prefixes[0].blocks if b.clear[1] > b.clear[0]]
    shared = CONFIG.num_attention_heads // CONFIG.num_key_value_heads
    position = group.prefixes[0].anchor + group.prefixes[0].depth
    positions = [len(position[slice(*b.rows)].unique()) for b in blocks]
    rows = [b.rows[1] - b.rows[0] for b in blocks]
    assert asked == [shared * n for n in positions + rows]
    assert sum(positions) < 0.5 * sum(rows)


def test_gradients_that_cancel_still_carry_their_product() -> None:
    """Two rows ask the same, with opposite gradients and different outputs: what is left are the outputs."""
    grad, out = torch.zeros(1, 1, 2, 4), torch.randn(1, 1, 2, 4, generator=torch.Generator().manual_seed(0))
    grad[0, 0, 0], grad[0, 0, 1] = 1.5, -1.5
    alike = Alike(torch.tensor([1]), torch.tensor([0, 0]))
    total, q, along, lse = alike.sums(grad, out, out, torch.zeros(1, 1, 2))
    assert float(total.abs().max()) < 1e-15 and torch.equal(q, out[:, :, 1:]) and float(lse) == 0
    torch.testing.assert_close((total * along).sum(), (grad * out).sum())


@pytest.mark.parametrize("kind", ["kl", "ce"])
@pytest.mark.parametrize("settings", [EngineSettings(3, 2), EngineSettings(backend="reference")])
def test_a_frozen_output_matrix_has_no_gradient_and_changes_no_other(
    settings: EngineSettings, kind: Literal["kl", "ce"]
) -> None:
    head, documents = toy_head(), [toy_document(**d) for d in DOCUMENTS]  # type: ignore[arg-type]
    trained = gradients(head, fast_loss(head, documents, kind, settings=settings)[0])
    head.lm_head.weight.requires_grad_(False)
    frozen = gradients(head, fast_loss(head, documents, kind, settings=settings)[0])
    assert set(trained) - set(frozen) == {"lm_head.weight"}
    for name, gradient in frozen.items():
        assert torch.equal(gradient, trained[name]), name
    loss = VocabularyLoss(head, lambda last: last, pack(documents), kind, torch.ones(4), 7, gradients=True)
    assert loss.d_lm_head is None


@pytest.mark.parametrize("least", [matmul.LEAST_OPERATIONS, 0], ids=["torch's products", "oneDNN's"])
def test_float32_gradients_stay_within_one_in_a_hundred_thousand(
    least: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "LEAST_OPERATIONS", least)
    monkeypatch.setitem(prefix.WIDTH, "cpu", 8)
    documents = [toy_document(**d) for d in LONG]  # type: ignore[arg-type]
    exact, single = toy_head(), toy_head(dtype=torch.float32)
    slow, _ = fast_loss(exact, documents, attention=RuleAttention)
    fast, _ = fast_loss(single, documents, settings=EngineSettings(9, 16))
    assert abs(fast.item() - slow.item()) <= 1e-5 * abs(slow.item())
    ours = torch.autograd.grad(fast, [p for p in single.parameters()])
    theirs = torch.autograd.grad(slow, [p for p in exact.parameters()])
    for mine, reference in zip(ours, theirs, strict=True):
        assert (mine.double() - reference).norm() <= 1e-5 * reference.norm().clamp(min=1)


def test_groups_are_whole_chains_in_order() -> None:
    head = toy_head()
    batch = pack([toy_document(**d) for d in LONG])  # type: ignore[arg-type]
    for rows in (1, 4, 10, None):
        groups = groups_of(head, batch, rows)
        assert [g.reals[0] for g in groups] == [0, *(g.reals[1] for g in groups[:-1])]
        assert [g.masks[0] for g in groups] == [0, *(g.masks[1] for g in groups[:-1])]
        assert groups[-1].reals[1] == len(batch.chains.anchor) and groups[-1].masks[1] == batch.num_mask_slots
        for group in groups:
            start, end = (batch.num_slots + row for row in group.masks)
            assert group.masks[1] - group.masks[0] <= max(rows or 10**9, int(batch.chains.masks.max()))
            if end > start:
                assert int(batch.depth[start]) == 1  # starts a chain
            assert set(group.elements.tolist()) == set(range(*group.reals)) | {
                len(batch.chains.anchor) + m for m in range(*group.masks)
            }


def test_the_targets_distribution_is_made_once_per_position(monkeypatch: pytest.MonkeyPatch) -> None:
    head = toy_head()
    documents = [toy_document(**d) for d in LONG]  # type: ignore[arg-type]
    batch = pack(documents)
    made: list[tuple[int, int]] = []
    original = engine_module.VocabularyLoss.__init__

    def counted(self: VocabularyLoss, *given: object) -> None:
        original(self, *given)  # type: ignore[arg-type]
        make = self.targets._make
        self.targets._make = lambda a, b: (made.append((a, b)), make(a, b))[1]  # type: ignore[method-assign]

    monkeypatch.setattr(engine_module.VocabularyLoss, "__init__", counted)
    fast_loss(head, documents, settings=EngineSettings(5, 4))
    rows = [row for a, b in made for row in range(a, b)]
    assert len(rows) == len(set(rows)) <= batch.last.shape[0]


def test_logits_exist_for_one_chunk_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """No tensor of the vocabulary's width has more rows than a chunk (the gradient of lm_head apart)."""
    tallest, softmax = 0, torch.softmax

    def watched(logits: Tensor, dim: int, **given: Any) -> Tensor:
        nonlocal tallest
        if logits.shape[-1] == CONFIG.draft_vocab_size:
            tallest = max(tallest, logits.shape[0])
        return softmax(logits, dim, **given)

    monkeypatch.setattr(torch, "softmax", watched)
    fast_loss(toy_head(), [toy_document(**d) for d in LONG], settings=EngineSettings(None, 6))  # type: ignore[arg-type]
    assert tallest == 6


def test_depth_weights() -> None:
    head, documents = toy_head(), [toy_document(**d) for d in DOCUMENTS]  # type: ignore[arg-type]
    corrected = depth_weights("corrected", 4, 0.5, 0.2)
    assert corrected.tolist() == [1, 2, 4, 5]
    parts = [
        fast_loss(head, documents, weights=torch.eye(4, dtype=torch.float64)[depth])[0] for depth in range(4)
    ]
    weighted, _ = fast_loss(head, documents, weights=corrected)
    assert_same(head, weighted, sum(w * p for w, p in zip(corrected.tolist(), parts, strict=True)), 1e-9)


def test_gradients_are_handed_out_once_and_scaled() -> None:
    weight = torch.zeros(3, requires_grad=True)
    unused = torch.zeros(2, requires_grad=True)
    loss = deliver(torch.tensor(5.0), [weight, unused], [torch.tensor([1.0, 2.0, 3.0]), None])
    (loss * 2).backward(retain_graph=True)
    assert weight.grad is not None and weight.grad.tolist() == [2, 4, 6]
    assert unused.grad is not None and unused.grad.tolist() == [0, 0]
    with pytest.raises(RuntimeError, match="handed out already"):
        loss.backward()


def test_no_hook_of_a_parameter_fires_before_the_outer_backward() -> None:
    """DDP, DeepSpeed and FSDP hang theirs there: one call per parameter, however many groups."""
    head = toy_head()
    calls: dict[str, int] = {}
    for name, parameter in head.named_parameters():
        parameter.register_post_accumulate_grad_hook(
            lambda p, name=name: calls.update({name: calls.get(name, 0) + 1})
        )
    loss, _ = fast_loss(head, [toy_document(**d) for d in LONG], settings=EngineSettings(3, 4))  # type: ignore[arg-type]
    assert not calls
    loss.backward()
    assert calls == {name: 1 for name, _ in head.named_parameters()}


@pytest.mark.parametrize("method", [{}, EAGLE3])
@pytest.mark.parametrize("settings", [EngineSettings(3, 4), EngineSettings(None, 1000, "reference")])
def test_best_tokens_are_those_of_the_logits(settings: EngineSettings, method: dict[str, Any]) -> None:
    config = replace(CONFIG, **method)
    head = toy_head(**method)
    batch = pack([toy_document(**d, config=config) for d in LONG])  # type: ignore[arg-type]
    assert torch.equal(best_tokens(head, batch, settings), head.logits(residuals(head, batch)).argmax(-1))


def test_the_reference_backend_equals_the_streams() -> None:
    head, documents = toy_head(), [toy_document(**d) for d in LONG]  # type: ignore[arg-type]
    streams_loss, _ = fast_loss(head, documents, settings=EngineSettings(9, 11))
    dense, _ = fast_loss(head, documents, settings=EngineSettings(9, 11, "reference"))
    assert_same(head, streams_loss, dense, 1e-10)


@pytest.mark.parametrize("loss_rows", [1, 6, 1000])
def test_eagle3_in_chunks(loss_rows: int) -> None:
    config = replace(CONFIG, **EAGLE3)
    head, documents = toy_head(**EAGLE3), [toy_document(**d, config=config) for d in DOCUMENTS]  # type: ignore[arg-type]
    slow, _ = reference_loss(head, documents, *target_output())
    fast, _ = fast_loss(head, documents, settings=EngineSettings(None, loss_rows))
    assert_same(head, fast, slow, 1e-10)


def _chain_cut_short(patch: pytest.MonkeyPatch) -> None:
    original = streams.OwnChains
    patch.setattr(
        streams, "OwnChains", lambda stride, lengths, longest: original(stride, lengths.clamp(max=2), 2)
    )


def _local_softmax(patch: pytest.MonkeyPatch) -> None:
    """The log-sum-exp of the own chain alone reaches the backward."""
    merge = prefix.merge_into
    patch.setattr(prefix, "merge_into", lambda out, lse, *part: merge(out, lse.clone(), *part))


@pytest.mark.parametrize("plant", [_chain_cut_short, _local_softmax])
def test_the_reference_notices(
    plant: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    head, documents = toy_head(), [toy_document(**d) for d in LONG]  # type: ignore[arg-type]
    slow, _ = fast_loss(head, documents, attention=RuleAttention)
    monkeypatch.setitem(prefix.WIDTH, "cpu", 4)
    plant(monkeypatch)
    fast, _ = fast_loss(head, documents)
    with pytest.raises(AssertionError):
        assert_same(head, fast, slow, 1e-6)
