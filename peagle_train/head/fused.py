"""Pointwise operations whose backward keeps little.

Written with autograd alone each of these would keep every intermediate of its formula. Here a norm keeps its
input, a rotation nothing but its angles, and the MLP its two projections: what lies between them and
`down_proj` is made again in the backward, for two cheap passes over it.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle_train.head.matmul import product


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., H] over its root mean square, times weight [H]; computed in at least float32."""
    return _RMSNorm.apply(x, weight, eps)


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        scale = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        scale = scale.div_(x.shape[-1]).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, scale)
        return (wide * scale).to(x.dtype) * weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        x, weight, scale = ctx.saved_tensors
        wide, grad = weight.to(scale.dtype), grad.to(scale.dtype)
        normed = x.to(scale.dtype) * scale
        product = grad * normed
        d_weight = product.flatten(0, -2).sum(0).to(weight.dtype)
        d_x = None
        if ctx.needs_input_grad[0]:
            along = torch.mv(product.flatten(0, -2), wide).div_(x.shape[-1]).view_as(scale)
            d_x = (grad * wide).addcmul_(normed, along, value=-1).mul_(scale).to(x.dtype)
        return d_x, d_weight, None


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x [N, heads, D] turned by the angles of its rows, cos and sin [N, 1, D/2]; in x's dtype."""
    return _Rotate.apply(x, cos, sin)


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, -sin), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    turned = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    left, right = turned.chunk(2, -1)
    left.copy_(first * cos).addcmul_(second, sin, value=-1)
    right.copy_(second * cos).addcmul_(first, sin)
    return turned


def gated_down(gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
    """(silu(gate) * up) @ weight.T: gate and up [N, FF], weight [H, FF] -> [N, H]."""
    return _GatedDown.apply(gate, up, weight)


class _GatedDown(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up, weight)
        with torch.autocast(gate.device.type, enabled=False):
            return product(_silu(gate).mul_(up), weight.to(gate.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        gate, up, weight = ctx.saved_tensors
        with torch.autocast(gate.device.type, enabled=False):
            opened = _silu(gate)
            d_weight = (grad.T @ (opened * up)).to(weight.dtype) if ctx.needs_input_grad[2] else None
            d_product = product(grad, weight.to(gate.dtype).T)
            d_up = opened.mul_(d_product)
            d_gate = torch.ops.aten.silu_backward(d_product.mul_(up), gate)
        return d_gate, d_up, d_weight


def _silu(x: Tensor) -> Tensor:
    # On CPUs torch's silu takes three times as long as its sigmoid and a product.
    return torch.sigmoid(x).mul_(x) if x.device.type == "cpu" else F.silu(x)
