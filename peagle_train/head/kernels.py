"""Attention over keys that every query sees, with what its backward needs: the log-sum-exp.

A softmax over several groups of keys is the sum of softmaxes over each, weighted by their log-sum-exp;
and the gradient of each group is that of an attention whose output and log-sum-exp are those of the whole.
So a kernel here is two functions, and whoever merges groups hands the backward the merged values
(`prefix.py`). torch's public attention hides the log-sum-exp. The operators beneath show it, but may change
with any version: before first use on a device each is compared with `tiled`, which uses public operators
alone, and a kernel that is missing or differs is never used.

Shapes: queries q [Hkv, R, D], keys and values [Hkv, S, D]: query heads that share a key head lie one after
the other in R, so that no key is ever repeated. out [Hkv, R, D] in q's dtype, lse [Hkv, R] in float32 or
wider. Scores are scaled by D ** -0.5.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

TILE = 512
"""Queries, and keys, of one tile of `tiled`: no more scores than TILE x TILE a head exist at one time."""

LEAST = -50.0
"""Logarithm of the smallest weight, 2e-22: nothing beside 1, in float64 too. On CPUs an exponential that
underflows is far slower than another, and so are products of its denormal results."""

FAR = 1e30
"""Far below any score."""


class Kernel(Protocol):
    """Attention over keys that every query sees."""

    name: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """(out, lse)."""
        ...

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Gradients of q, k and v; `out` and `lse` are those of the whole softmax these keys are part of."""
        ...


class Tiled:
    """Products of tiles by public operators: any device, any dtype."""

    name = "tiled"

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scale, wide = q.shape[-1] ** -0.5, torch.promote_types(q.dtype, torch.float32)
        outs, lses = [], []
        for rows in q.split(TILE, 1):
            out = torch.zeros(rows.shape, dtype=wide, device=q.device)
            lse = torch.full(rows.shape[:-1], float("-inf"), dtype=wide, device=q.device)
            for keys, values in zip(k.split(TILE, 1), v.split(TILE, 1), strict=True):
                weights, part_lse = weigh(torch.bmm(rows, keys.transpose(1, 2)).to(wide).mul_(scale))
                merge_into(out, lse, torch.bmm(weights.to(v.dtype), values).to(wide), part_lse)
            outs.append(out.to(q.dtype))
            lses.append(lse)
        return torch.cat(outs, 1), torch.cat(lses, 1)

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        scale, wide = q.shape[-1] ** -0.5, torch.promote_types(q.dtype, torch.float32)
        dq = torch.zeros_like(q, dtype=wide)
        dk, dv = torch.zeros_like(k, dtype=wide), torch.zeros_like(v, dtype=wide)
        delta = (grad.to(wide) * out.to(wide)).sum(-1, keepdim=True)
        for r in range(0, q.shape[1], TILE):
            rows = slice(r, r + TILE)
            for s in range(0, k.shape[1], TILE):
                keys = slice(s, s + TILE)
                scores = torch.bmm(q[:, rows], k[:, keys].transpose(1, 2)).to(wide)
                weights = weigh_again(scores.mul_(scale), lse[:, rows])
                dv[:, keys] += torch.bmm(weights.to(v.dtype).transpose(1, 2), grad[:, rows])
                slope = torch.bmm(grad[:, rows], v[:, keys].transpose(1, 2)).to(wide)
                slope = slope.sub_(delta[:, rows]).mul_(weights).mul_(scale).to(q.dtype)
                dq[:, rows] += torch.bmm(slope, k[:, keys])
                dk[:, keys] += torch.bmm(slope.transpose(1, 2), q[:, rows])
        return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


class FusedCPU:
    """The operator under torch's attention on CPUs."""

    name = "fused-cpu"

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
        out, lse = operator(q[None], k[None], v[None])
        return out[0], lse[0]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        operator = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
        dq, dk, dv = operator(grad[None], q[None], k[None], v[None], out[None], lse[None], 0.0, False)
        return dq[0], dk[0], dv[0]


class FlashCUDA:
    """The flash attention inside torch: half precision on NVIDIA GPUs."""

    name = "flash-cuda"

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        operator = torch.ops.aten._scaled_dot_product_flash_attention
        out, lse, *_ = operator(q[None], k[None], v[None], 0.0, False, False)
        return out[0], lse[0]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        operator = torch.ops.aten._scaled_dot_product_flash_attention_backward
        # Without dropout the two random states are never read.
        none = torch.zeros(2, dtype=torch.uint64, device=q.device)
        lengths = (None, None, q.shape[1], k.shape[1])
        dq, dk, dv = operator(
            grad[None],
            q[None],
            k[None],
            v[None],
            out[None],
            lse[None].contiguous(),
            *lengths,
            0.0,
            False,
            none,
            none,
        )
        return dq[0], dk[0], dv[0]


class EfficientCUDA:
    """The memory-efficient attention inside torch: float32 on NVIDIA GPUs."""

    name = "efficient-cuda"

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        operator = torch.ops.aten._scaled_dot_product_efficient_attention
        out, lse, *_ = operator(q[None], k[None], v[None], None, True)
        return out[0], lse[0, :, : q.shape[1]]  # the operator pads its rows

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        operator = torch.ops.aten._scaled_dot_product_efficient_attention_backward
        none = torch.zeros((), dtype=torch.int64, device=q.device)
        rows = -(-q.shape[1] // 32) * 32
        padded = torch.nn.functional.pad(lse, (0, rows - lse.shape[1]), value=float("inf"))
        dq, dk, dv, _ = operator(
            grad[None],
            q[None],
            k[None],
            v[None],
            None,
            out[None],
            padded[None],
            none,
            none,
            0.0,
            [True, True, True, False],
        )
        return dq[0], dk[0], dv[0]


def weigh(scores: Tensor, seen: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Softmax in place and its log-sum-exp.

    Args:
        scores: [..., R, S].
        seen: 1.0 where a row sees a key and 0.0 elsewhere, in the scores' dtype, broadcast against them;
            None: everywhere.

    Returns:
        weights, exactly 0 where unseen, and lse [..., R]; a row that sees nothing has lse -inf.
    """
    if seen is not None:
        scores.add_((seen - 1) * FAR)
    top = scores.amax(-1, keepdim=True)
    blind = top < -FAR / 2
    weights = scores.sub_(top).clamp_(min=LEAST).exp_()
    if seen is not None:
        weights.mul_(seen)
    total = weights.sum(-1, keepdim=True).masked_fill_(blind, 1.0)
    lse = total.log().add_(top).masked_fill_(blind, float("-inf"))
    return weights.div_(total), lse[..., 0]


def weigh_again(scores: Tensor, lse: Tensor, seen: Tensor | None = None) -> Tensor:
    """The same weights in place, as shares of a whole softmax with log-sum-exp `lse` [..., R]."""
    # A share is at most 1; what is not seen may score anything and must not overflow before it is 0.
    weights = scores.sub_(lse[..., None]).clamp_(LEAST, 1.0).exp_()
    return weights if seen is None else weights.mul_(seen)


def merge_into(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> None:
    """Adds another group of keys to the attention over some, in place; -inf is the lse of no keys at all.

    out, part [..., R, D]; lse, part_lse [..., R].
    """
    whole = torch.logaddexp(lse, part_lse)
    out.mul_((lse - whole).exp_()[..., None]).addcmul_(part, (part_lse - whole).exp_()[..., None])
    lse.copy_(whole)


CANDIDATES: dict[str, list[type[Any]]] = {"cpu": [FusedCPU], "cuda": [FlashCUDA, EfficientCUDA]}
"""By kind of device, fastest first."""


@dataclass(frozen=True)
class Chosen:
    """A kernel that was proven on a device, and the faster ones that were not taken, with the reason."""

    kernel: Kernel
    refused: tuple[str, ...]


def kernel_for(device: torch.device, dtype: torch.dtype, head_dim: int) -> Chosen:
    """The fastest kernel that equals `tiled` on this device in this dtype."""
    return _kernel_for(device.type, device.index, dtype, head_dim)


@cache
def _kernel_for(kind: str, index: int | None, dtype: torch.dtype, head_dim: int) -> Chosen:
    refused: list[str] = []
    for candidate in CANDIDATES.get(kind, []):
        kernel: Kernel = candidate()
        fault = fault_of(
            kernel, torch.device(kind, index) if index is not None else torch.device(kind), dtype, head_dim
        )
        if fault is None:
            return Chosen(kernel, tuple(refused))
        refused.append(f"{kernel.name}: {fault}")
    return Chosen(Tiled(), tuple(refused))


def fault_of(kernel: Kernel, device: torch.device, dtype: torch.dtype, head_dim: int) -> str | None:
    """What is wrong with a kernel here; None if it equals `tiled`, merged values in the backward included."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device, dtype)

    q, k, v, grad, other = (draw(2, n, head_dim) for n in (70, 45, 45, 70, 70))
    exact, tolerance = Tiled(), {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 5e-2)
    try:
        out, lse = kernel.forward(q, k, v)
        expected, expected_lse = exact.forward(q, k, v)
        # As part of a larger softmax: other keys bring `other` with a log-sum-exp of 1.
        whole, whole_lse = expected.to(expected_lse.dtype, copy=True), expected_lse.clone()
        merge_into(whole, whole_lse, other, torch.ones_like(expected_lse))
        whole = whole.to(dtype)
        got = [out, lse, *kernel.backward(grad, q, k, v, whole, whole_lse)]
    except (RuntimeError, TypeError, ValueError, AttributeError, NotImplementedError) as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0]}"
    want = [expected, expected_lse, *exact.backward(grad, q, k, v, whole, whole_lse)]
    for name, ours, theirs in zip(("out", "lse", "dq", "dk", "dv"), got, want, strict=True):
        if ours.shape != theirs.shape:
            return f"{name} has shape {tuple(ours.shape)}, expected {tuple(theirs.shape)}"
        worst = float((ours.float() - theirs.float()).abs().max())
        if not worst <= tolerance * max(1.0, float(theirs.float().abs().max())):
            return f"{name} differs by {worst:.1e}"
    return None
