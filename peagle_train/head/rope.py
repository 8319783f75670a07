"""Rotary position embedding, with the four kinds of scaling a drafter can have.

    default   theta alone
    linear    positions divided by `factor`
    llama3    low frequencies divided by `factor`, high ones kept, a ramp between (Llama 3.1)
    yarn      the same idea by rotations over the original context, and all angles' cos and sin
              multiplied by an attention factor (Peng et al. 2023, arXiv 2309.00071)

Each is computed as vLLM 0.32 computes it (model_executor/layers/rotary_embedding/), in float32, because a
drafter's far positions must turn exactly as they did in training. A head's RoPE need not be its target's.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch
from torch import Tensor

_NEEDS: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
    "yarn": ("factor", "original_max_position_embeddings"),
}
_MAY_HAVE: dict[str, tuple[str, ...]] = {
    "yarn": ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim", "truncate")
}
KINDS = tuple(_NEEDS)


@dataclass(frozen=True)
class Rope:
    """RoPE of a head, keys as transformers names them.

    theta: base of the frequencies. rope_type: one of `KINDS`. The rest belongs to one kind or another and
    is None where it does not, or where that kind's default holds (beta_fast 32, beta_slow 1, truncate true,
    attention_factor 0.1 ln(factor) + 1).

    Raises:
        ValueError: an unknown kind, a key the kind lacks, one it does not know, or a value out of range.
    """

    theta: float
    rope_type: str = "default"
    factor: float | None = None
    original_max_position_embeddings: int | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None

    def __post_init__(self) -> None:
        kind = self.rope_type
        if kind not in KINDS:
            raise ValueError(f"rope_type {kind!r}; expected one of {', '.join(KINDS)}")
        needed, allowed = _NEEDS[kind], (*_NEEDS[kind], *_MAY_HAVE.get(kind, ()))
        given = self.scaling
        for key in needed:
            if key not in given:
                raise ValueError(f"rope_type {kind} has no {key}; expected {', '.join(needed)}")
        for key in given:
            if key not in allowed:
                raise ValueError(
                    f"rope_type {kind} does not know {key}; expected {', '.join(allowed) or 'none'}"
                )
        if (self.mscale is None) != (self.mscale_all_dim is None):
            raise ValueError("mscale and mscale_all_dim belong together: one alone changes nothing")
        for key, value in {"theta": self.theta, **given}.items():
            if key != "truncate" and not 0 < value < math.inf:
                raise ValueError(f"{key} is {value}; expected a positive number")
        if self.factor is not None and self.factor < 1:
            raise ValueError(f"factor is {self.factor}; expected at least 1: scaling stretches a context")

    @property
    def scaling(self) -> dict[str, Any]:
        """What is set beyond theta and kind."""
        values = asdict(self)
        return {k: v for k, v in values.items() if k not in ("theta", "rope_type") and v is not None}

    @classmethod
    def from_parameters(cls, theta: float, parameters: dict[str, Any] | None) -> Rope:
        """From a `rope_scaling` or `rope_parameters` mapping of a config.json (None: plain RoPE).

        Raises ValueError as the class does, and for a key no kind has.
        """
        given = {key: value for key, value in (parameters or {}).items() if value is not None}
        given.pop("rope_theta", None)
        given["rope_type"] = given.pop("rope_type", given.pop("type", "default"))
        given.pop("type", None)
        unknown = set(given) - {field.name for field in fields(cls)}
        if unknown:
            raise ValueError(
                f"RoPE of kind {given['rope_type']!r} with {', '.join(sorted(unknown))} is not known"
            )
        for key in ("factor", "low_freq_factor", "high_freq_factor", "beta_fast", "beta_slow"):
            if key in given:
                given[key] = float(given[key])
        return cls(theta=float(theta), **given)

    @property
    def reach(self) -> float:
        """Positions vLLM has a table for; beyond them it reads past the table. Infinite: as many as asked."""
        if self.rope_type != "yarn":
            return math.inf
        assert self.original_max_position_embeddings is not None and self.factor is not None
        return self.original_max_position_embeddings * self.factor

    def frequencies(self, head_dim: int, device: torch.device | str = "cpu") -> Tensor:
        """[D/2] float32, radians per position (for linear: per divided position)."""
        exponents = torch.arange(0, head_dim, 2, dtype=torch.float32, device=device) / head_dim
        periods = self.theta**exponents
        if self.rope_type == "llama3":
            return self._llama3(1.0 / periods)
        if self.rope_type == "yarn":
            return self._yarn(periods, head_dim)
        return 1.0 / periods

    @property
    def stretch(self) -> float:
        """By what positions are divided."""
        return self.factor if self.rope_type == "linear" and self.factor is not None else 1.0

    @property
    def magnitude(self) -> float:
        """By what cos and sin are multiplied."""
        if self.rope_type != "yarn":
            return 1.0
        if self.attention_factor is not None:
            return self.attention_factor
        assert self.factor is not None
        if self.mscale and self.mscale_all_dim:
            return _mscale(self.factor, self.mscale) / _mscale(self.factor, self.mscale_all_dim)
        return _mscale(self.factor, 1.0)

    def angles(self, positions: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """cos and sin [N, D/2] of positions [N], in the float dtype of `positions` (float32 if integer)."""
        if not positions.is_floating_point():
            positions = positions.float()
        turned = (positions / self.stretch)[:, None] * self.frequencies(head_dim, positions.device)
        return turned.cos() * self.magnitude, turned.sin() * self.magnitude

    def _llama3(self, plain: Tensor) -> Tensor:
        assert self.factor and self.low_freq_factor and self.high_freq_factor
        assert self.original_max_position_embeddings is not None
        turns = self.original_max_position_embeddings * plain / (2 * math.pi)  # over the original context
        low, high = self.low_freq_factor, self.high_freq_factor
        kept = ((turns - low) / (high - low)).clamp(0, 1) if high != low else (turns > high).float()
        return (1 - kept) * plain / self.factor + kept * plain

    def _yarn(self, periods: Tensor, head_dim: int) -> Tensor:
        assert self.factor is not None and self.original_max_position_embeddings is not None
        original = self.original_max_position_embeddings

        def channel(turns: float) -> float:
            """The channel pair, as a real number, that turns so often over the original context."""
            return head_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(self.theta))

        first, last = channel(self.beta_fast or 32.0), channel(self.beta_slow or 1.0)
        if self.truncate is not False:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, head_dim - 1)
        width = last - first if last != first else 0.001
        channels = torch.arange(head_dim // 2, dtype=torch.float32, device=periods.device)
        kept = 1 - ((channels - first) / width).clamp(0, 1)
        # The order of operations is vLLM's: one unit in the last place is a hundredth of a radian at 100k.
        return 1.0 / (self.factor * periods) * (1 - kept) + 1.0 / periods * kept


def _mscale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1.0 if factor > 1 else 1.0
