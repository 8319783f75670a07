"""Products of activations and weights, by the fastest library at hand.

torch hands float32 products on CPUs to its BLAS. oneDNN, which torch carries as well, was faster by a tenth
and more on the AMD CPUs measured (`make side-by-side` prints both rates), but its float32 product is public
only for tensors in a layout of their own. The operator beneath takes plain ones. It may change with any
version: before first use it is compared with torch's own product, and where it is missing or differs
torch's own is used.

It makes a program for each new shape, which takes about a millisecond: products of fewer operations than
LEAST_OPERATIONS, whose shapes change with every batch of a small run, go to torch's own. Which one is used
follows from shapes alone, so a resumed run repeats the bits of one that was never interrupted.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

LEAST_OPERATIONS = 2_000_000_000
"""Multiplications and additions of a product worth a program of its own: some 20 ms of one core."""


def product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T without autograd: x [N, I], weight [O, I], either of them a transposed view -> [N, O]."""
    if not suits(x, weight):
        return x @ weight.T
    return _by_onednn(x, weight)


def suits(x: Tensor, weight: Tensor) -> bool:
    """Whether oneDNN computes this product: large, float32, on a CPU, not under autocast."""
    return (
        x.device.type == "cpu"
        and x.dtype == weight.dtype == torch.float32
        and x.dim() == 2
        and 2 * x.shape[0] * weight.numel() >= LEAST_OPERATIONS
        and not torch.is_autocast_enabled("cpu")
        and bool(torch.backends.mkldnn.enabled)
        and fault_of_onednn() is None
    )


class Linear(nn.Linear):
    """torch's, with its products by `product` where they suit and there is no bias."""

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is not None or not suits(x, self.weight):
            return super().forward(x)
        return _Linear.apply(x, self.weight)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        d_x = product(grad, weight.T) if ctx.needs_input_grad[0] else None
        # oneDNN would have to copy a transposed gradient.
        d_weight = grad.T @ x if ctx.needs_input_grad[1] else None
        return d_x, d_weight


def _by_onednn(x: Tensor, weight: Tensor) -> Tensor:
    return torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")


@cache
def fault_of_onednn() -> str | None:
    """What is wrong with the operator here; None if it equals torch's own product."""
    generator = torch.Generator().manual_seed(0)
    x, weight = (torch.randn(n, 48, generator=generator) for n in (33, 40))
    grad = torch.randn(33, 40, generator=generator)
    try:
        pairs = [(_by_onednn(a, b), a.double() @ b.double().T) for a, b in ((x, weight), (grad, weight.T))]
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    for got, want in pairs:
        if got.shape != want.shape or got.dtype != torch.float32:
            return f"a product is {tuple(got.shape)} in {got.dtype}, expected {tuple(want.shape)} in float32"
        worst = float((got.double() - want).norm() / want.norm())
        if not worst <= 1e-6:
            return f"a product differs by {worst:.1e}"
    return None
