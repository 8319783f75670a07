"""Rows that ask the same query: a kernel answers each kind of them once.

All mask slots enter layer 0 as one row, which only RoPE tells apart, so the slots of one position ask the
same there: (a, 3), (a+1, 2), (a+2, 1). Over keys that all of them see they get the same answer.

Shapes: q, grad, out [Hkv, g, rows, D], lse [Hkv, g, rows]; of the kinds [Hkv, g, u, D] and [Hkv, g, u].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from peagle_train.head.kernels import LEAST

PAYS = 0.75
"""Kinds per row beneath which asking once is worth the copies it takes."""


@dataclass(frozen=True)
class Alike:
    """Which rows of a block ask the same query. Both int64, on the rows' device."""

    one: Tensor  # [u] a row of each kind
    kind: Tensor  # [rows] which of these a row is like

    def one_of_each(self, x: Tensor) -> Tensor:
        """What the rows of `one` have."""
        return x.index_select(2, self.one)

    def for_all(self, x: Tensor) -> Tensor:
        """Every row gets what its kind has."""
        return x.index_select(2, self.kind)

    def to_the_one(self, x: Tensor) -> Tensor:
        """The row of `one` gets what its kind has, the others 0."""
        rows = x.new_zeros(*x.shape[:2], len(self.kind), *x.shape[3:])
        return rows.index_copy_(2, self.one, x)

    def sums(
        self, grad: Tensor, q: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """grad, q, out and lse of each kind, with which a kernel's backward gives the sum over its rows.

        The weights exp(score - lse) of rows that ask the same differ by a factor alone, exp(least lse - lse),
        and the gradients of scores, keys and values are sums over rows of

            weight * grad    and    weight * (grad . value - grad . out)

        So one row stands for all of a kind: with the least lse, the gradients times their factors added up,
        and an `out` whose product with that sum is what the rows' products times their factors add up to.
        All that a backward asks of `out` is this product; along the sum itself it comes without cancellation.
        """
        kinds, tiny = (*lse.shape[:2], len(self.one)), torch.finfo(lse.dtype).tiny
        least = lse.new_full(kinds, float("inf")).scatter_reduce_(2, self.kind.expand_as(lse), lse, "amin")
        factor = (self.for_all(least) - lse).clamp_(min=LEAST).exp_()[..., None]
        weighted = grad * factor
        total = lse.new_zeros(*kinds, grad.shape[-1]).index_add_(2, self.kind, weighted)
        products = weighted.mul_(out).sum(-1, keepdim=True)
        product = lse.new_zeros(*kinds, 1).index_add_(2, self.kind, products)
        # Where gradients cancel to the last bit, a vector too small to count carries the product.
        cancelled = (total.square().sum(-1, keepdim=True) < tiny) & (product != 0)
        total.masked_fill_(cancelled, tiny**0.5)
        along = total * product.div_(total.square().sum(-1, keepdim=True).clamp_(min=tiny))
        return total.to(q.dtype), self.one_of_each(q), along.to(q.dtype), least


def alike_of(position: Tensor, device: torch.device) -> Alike | None:
    """Rows [rows] by their position in one document; None where too few share one for it to pay."""
    kinds, kind = torch.unique(position, return_inverse=True)
    if len(kinds) > PAYS * len(position):
        return None
    one = torch.empty_like(kinds)
    one[kind] = torch.arange(len(kind))
    return Alike(one.to(device), kind.to(device))
