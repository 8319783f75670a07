"""Products by oneDNN equal torch's own, and are used where they pay and are proven, nowhere else."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from peagle_train.head import matmul
from peagle_train.head.matmul import Linear, product


@pytest.fixture(autouse=True)
def proven_anew() -> Iterator[None]:
    matmul.fault_of_onednn.cache_clear()
    yield
    matmul.fault_of_onednn.cache_clear()


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, ...]]:
    """Shapes of what oneDNN was given, its proof left out."""
    assert matmul.fault_of_onednn() is None
    seen: list[tuple[int, ...]] = []
    original = matmul._by_onednn

    def watched(x: Tensor, weight: Tensor) -> Tensor:
        seen.append((*x.shape, weight.shape[0]))
        return original(x, weight)

    monkeypatch.setattr(matmul, "_by_onednn", watched)
    return seen


def close(got: Tensor, want: Tensor) -> None:
    assert (got.double() - want.double()).norm() <= 1e-6 * want.double().norm()


def test_values_and_gradients_are_torchs(
    calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "LEAST_OPERATIONS", 0)
    ours, theirs = Linear(24, 40, bias=False), nn.Linear(24, 40, bias=False, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    x = torch.randn(17, 24, requires_grad=True)
    grad, wide = torch.randn(17, 40), x.detach().double().requires_grad_()
    out, expected = ours(x), theirs(wide)
    close(out, expected)
    got = torch.autograd.grad(out, (x, ours.weight), grad)
    for mine, reference in zip(
        got, torch.autograd.grad(expected, (wide, theirs.weight), grad.double()), strict=True
    ):
        close(mine, reference)
    assert calls == [(17, 24, 40), (17, 40, 24)]


def test_views_of_any_layout(calls: list[tuple[int, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmul, "LEAST_OPERATIONS", 0)
    weight = torch.randn(40, 24)
    for x in (
        torch.randn(1, 1).expand(17, 24),
        torch.randn(1, 24).expand(17, 24),
        torch.randn(24, 17).T,
        torch.randn(34, 48)[::2, 1::2],
    ):
        close(product(x, weight), x.double() @ weight.double().T)
        close(product(x, weight.T.contiguous().T), x.double() @ weight.double().T)
    assert calls == [(17, 24, 40)] * 8


def test_only_large_products_in_float32(calls: list[tuple[int, ...]]) -> None:
    # 1,000 rows by 1,000 x 1,000 are 2e9 operations.
    layer = Linear(1000, 1000, bias=False)
    for rows, times in ((999, 0), (1000, 1)):
        calls.clear()
        layer(torch.zeros(rows, 1000))
        assert len(calls) == times
    calls.clear()
    with torch.autocast("cpu", torch.bfloat16):
        assert layer(torch.zeros(1000, 1000)).dtype == torch.bfloat16
    layer.bfloat16()(torch.zeros(1000, 1000, dtype=torch.bfloat16))
    Linear(1000, 1000)(torch.zeros(1000, 1000))  # biases
    with torch.backends.mkldnn.flags(enabled=False):
        product(torch.zeros(1000, 1000), torch.zeros(1000, 1000))
    assert calls == []


def missing(x: Tensor, weight: Tensor) -> Tensor:
    raise AttributeError("'_OpNamespace' 'mkldnn' object has no attribute '_linear_pointwise'")


@pytest.mark.parametrize(
    ("operator", "fault"),
    [
        (missing, "AttributeError: '_OpNamespace' 'mkldnn'"),
        (lambda x, weight: x @ weight.T * 1.001, "a product differs by 1.0e-03"),
        (lambda x, weight: (x @ weight.T).T, "a product is (40, 33) in torch.float32, expected (33, 40)"),
        (lambda x, weight: (x @ weight.T).bfloat16(), "a product is (33, 40) in torch.bfloat16"),
    ],
)
def test_an_operator_that_is_missing_or_differs_is_never_used(
    operator: Callable[[Tensor, Tensor], Tensor], fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(matmul, "LEAST_OPERATIONS", 0)
    monkeypatch.setattr(matmul, "_by_onednn", operator)
    found = matmul.fault_of_onednn()
    assert found is not None and found.startswith(fault)
    x, weight = torch.randn(5, 6), torch.randn(7, 6)
    assert torch.equal(product(x, weight), x @ weight.T)
