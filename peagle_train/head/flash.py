"""The package flash-attn behind the two streams: half precision on NVIDIA GPUs.

Real slots of all documents go through one call over the packed rows. The clear parts of prefixes use the
package's forward and backward as they stand beneath its public functions: the backward must be given the
log-sum-exp of the whole softmax (`kernels.py`), which no public function takes. Such functions may change
with any version, so nothing here is used before it was proven on the device (`choose.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from peagle_train.head.causal import Spans, padding

PACKAGE = "flash_attn"


def interface() -> Any:
    """The package's module of functions; ImportError where it is missing or does not fit this torch."""
    return importlib.import_module(f"{PACKAGE}.flash_attn_interface")


def documents(q: Tensor, k: Tensor, v: Tensor, spans: Spans, window: int | None) -> Tensor:
    """Causal attention within each document. q [T, Hq, D], k and v [T, Hkv, D] -> [T, Hq, D]."""
    starts, longest = _boundaries(tuple(spans), q.device)
    rows = max((end for _, end in spans), default=0)
    out = interface().flash_attn_varlen_func(
        q[:rows],
        k[:rows],
        v[:rows],
        cu_seqlens_q=starts,
        cu_seqlens_k=starts,
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        causal=True,
        window_size=(-1, -1) if window is None else (window - 1, 0),
        deterministic=torch.are_deterministic_algorithms_enabled(),
    )
    return torch.cat([out, padding(q, v, spans)]) if rows < q.shape[0] else out


@lru_cache(maxsize=8)
def _boundaries(spans: tuple[tuple[int, int], ...], device: torch.device) -> tuple[Tensor, int]:
    """Where documents start and the last one ends, int32, and the longest length; the layers share them."""
    lengths = [end - start for start, end in spans if end > start]
    starts = torch.tensor(list(accumulate(lengths, initial=0)), dtype=torch.int32, device=device)
    return starts, max(lengths, default=0)


class FlashAttn:
    """The package's attention without a mask, as a `kernels.Kernel`: key heads are its heads."""

    name = "flash-attn"

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        out, lse, *_ = interface()._flash_attn_forward(
            *_by_slot((q, k, v)), **_plain(q), return_softmax=False
        )
        return out[0].transpose(0, 1), lse[0]

    def backward(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        grad, q, k, v, out = _by_slot((grad, q, k, v, out))
        gradients = [torch.empty(t.shape, dtype=t.dtype, device=t.device) for t in (q, k, v)]
        interface()._flash_attn_backward(
            grad,
            q,
            k,
            v,
            out,
            lse[None].contiguous(),
            *gradients,
            **_plain(q),
            deterministic=torch.are_deterministic_algorithms_enabled(),
        )
        dq, dk, dv = (d[0].transpose(0, 1) for d in gradients)
        return dq, dk, dv


def _by_slot(tensors: Sequence[Tensor]) -> list[Tensor]:
    """[Hkv, N, D] -> [1, N, Hkv, D], as the package has it."""
    return [t.transpose(0, 1)[None] for t in tensors]


def _plain(q: Tensor) -> dict[str, Any]:
    """Softmax over all keys: no mask, window, dropout, cap or slope."""
    return {
        "dropout_p": 0.0,
        "softmax_scale": q.shape[-1] ** -0.5,
        "causal": False,
        "window_size_left": -1,
        "window_size_right": -1,
        "softcap": 0.0,
        "alibi_slopes": None,
    }
