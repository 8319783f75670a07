"""The learning rate, as a pure function of the step: nothing to save, nothing to warm up again."""

from __future__ import annotations

import math
from typing import Literal


def learning_rate_at(
    step: int,
    *,
    peak: float,
    warmup_steps: int,
    total_steps: int,
    decay: Literal["linear", "cosine", "constant"],
) -> float:
    """Rate of step 0, 1, ...: rises linearly over the warm-up, then falls to zero after the last step."""
    if step < warmup_steps:
        return peak * (step + 1) / warmup_steps
    if decay == "constant":
        return peak
    progress = (step - warmup_steps) / max(1, total_steps - warmup_steps)
    return peak * (1 - progress if decay == "linear" else 0.5 * (1 + math.cos(math.pi * progress)))
