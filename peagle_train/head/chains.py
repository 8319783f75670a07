"""The attention of each row to its own chain.

A chain is at most K - 1 long, so its keys are a narrow band beside the diagonal. Rows are taken 64 at a
time against the keys that any of them may see: a few matrix products under a small mask, instead of one
tiny product per row or a copy of the chain for each of its rows.

    row i sees keys  end - length[i] .. end - 1,   end = (i + 1) * stride
    mask slots       stride 1, length = depth: a chain's rows are neighbours, each its own last key
    eagle3's step d  stride d, length = d: the keys of chain i are d neighbours

Shapes: rows, out [Hkv, g, m, D], lse [Hkv, g, m], k and v [m * stride, Hkv, D].
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle_train.head.kernels import weigh, weigh_again

BAND = 64
"""Keys of a band, beside those that reach back from its first row."""


@dataclass(frozen=True)
class OwnChains:
    """Which keys are a row's own. lengths [m] int64 >= 1, on the rows' device; longest is their maximum."""

    stride: int
    lengths: Tensor
    longest: int

    @property
    def back(self) -> int:
        """Keys that the first row of a band sees of the band before."""
        return max(self.longest - self.stride, 0)

    @property
    def rows(self) -> int:
        """Rows in a band."""
        return max(BAND // self.stride, -(-self.back // self.stride), 1)

    @property
    def step(self) -> int:
        """Keys between the starts of two bands; a band has `back` more."""
        return self.rows * self.stride

    def seen(self, dtype: torch.dtype) -> Tensor:
        """[bands, 1, 1, rows, step + back]: 1 for the keys of a band that are a row's own, else 0."""
        device = self.lengths.device
        lengths = F.pad(self.lengths, (0, -len(self.lengths) % self.rows), value=1).view(-1, self.rows, 1)
        end = (torch.arange(self.rows, device=device)[:, None] + 1) * self.stride + self.back
        key = torch.arange(self.step + self.back, device=device)
        return ((key < end) & (key >= end - lengths))[:, None, None].to(dtype)

    def bands_of_rows(self, x: Tensor) -> Tensor:
        """[Hkv, g, m, D] -> [bands, Hkv, g * rows, D]."""
        padded = F.pad(x, (0, 0, 0, -x.shape[2] % self.rows))
        banded = padded.unflatten(2, (-1, self.rows))  # [Hkv, g, bands, rows, D]
        return banded.permute(2, 0, 1, 3, 4).flatten(2, 3)

    def rows_of_bands(self, x: Tensor, groups: int) -> Tensor:
        """The inverse of `bands_of_rows`."""
        parts = x.unflatten(2, (groups, self.rows)).permute(1, 2, 0, 3, 4)
        return parts.flatten(2, 3)[:, :, : len(self.lengths)]

    def bands_of_keys(self, x: Tensor) -> Tensor:
        """[n, Hkv, D] -> [bands, Hkv, step + back, D]."""
        padded = F.pad(x, (0, 0, 0, 0, self.back, -x.shape[0] % self.step))
        return padded.unfold(0, self.step + self.back, self.step).transpose(-1, -2)

    def keys_of_bands(self, x: Tensor, count: int) -> Tensor:
        """Adds up what bands [bands, Hkv, step + back, D] say of each key: [count, Hkv, D]."""
        bands, heads, _, width = x.shape
        total = x.new_zeros(bands + 1, self.step, heads, width)
        x = x.transpose(1, 2)
        total[:-1] += x[:, : self.step]
        total[1:, : self.back] += x[:, self.step :]
        return total.flatten(0, 1)[self.back : self.back + count]


def own_forward(rows: Tensor, k: Tensor, v: Tensor, chains: OwnChains) -> tuple[Tensor, Tensor]:
    """(out, lse), at least float32."""
    weights, lse = weigh(*_scores(rows, k, chains))
    weights, lse, groups = weights.flatten(2, 3), lse.flatten(2), rows.shape[1]
    out = torch.matmul(weights, chains.bands_of_keys(v).to(weights.dtype))
    return chains.rows_of_bands(out, groups), chains.rows_of_bands(lse[..., None], groups)[..., 0]


def own_backward(
    grad: Tensor, rows: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, chains: OwnChains
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, k and v; out and lse are those of the whole softmax the chains are part of."""
    scores, seen = _scores(rows, k, chains)
    banded_lse = chains.bands_of_rows(lse[..., None])[..., 0]  # [bands, Hkv, g * rows]
    weights = weigh_again(scores, banded_lse.unflatten(2, (-1, chains.rows)), seen).flatten(2, 3)
    wide = weights.dtype
    grad, out = grad.to(wide), out.to(wide)
    delta = chains.bands_of_rows((grad * out).sum(-1, keepdim=True))
    grad, queries = chains.bands_of_rows(grad), chains.bands_of_rows(rows.to(wide))
    keys, values = (chains.bands_of_keys(t).to(wide) for t in (k, v))
    slope = torch.matmul(grad, values.transpose(-1, -2))
    slope = slope.sub_(delta).mul_(weights).mul_(rows.shape[-1] ** -0.5)
    d_rows = chains.rows_of_bands(torch.matmul(slope, keys), rows.shape[1])
    d_k = chains.keys_of_bands(torch.matmul(slope.transpose(-1, -2), queries), len(k))
    d_v = chains.keys_of_bands(torch.matmul(weights.transpose(-1, -2), grad), len(v))
    return d_rows, d_k.to(k.dtype), d_v.to(v.dtype)


def _scores(rows: Tensor, k: Tensor, chains: OwnChains) -> tuple[Tensor, Tensor]:
    """[bands, Hkv, g, rows, step + back] and what of it is seen; at least float32."""
    wide = torch.promote_types(rows.dtype, torch.float32)
    queries = chains.bands_of_rows(rows).to(wide)
    scores = torch.matmul(queries, chains.bands_of_keys(k).to(wide).transpose(-1, -2))
    scores.mul_(rows.shape[-1] ** -0.5)
    return scores.unflatten(2, (-1, chains.rows)), chains.seen(wide)
