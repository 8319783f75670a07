"""The next token of every row: the likeliest, or drawn.

Each drawn row has a generator of its own, so what it says does not depend on the batch it is in: the same
number picks the same token, up to the rounding of the logits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Draw:
    """How one row is answered. temperature 0: greedily. top_p: the likeliest tokens with so much in all."""

    temperature: float = 0.0
    top_p: float = 1.0
    seed: int = 0


class Chooser:
    """Chooses the tokens of a batch, step by step."""

    def __init__(self, draws: Sequence[Draw] | None):
        """draws: of every prompt of the batch; None: all greedy."""
        self._draws = list(draws or ())
        self._generators = {
            row: torch.Generator().manual_seed(draw.seed)
            for row, draw in enumerate(self._draws)
            if draw.temperature > 0
        }

    def choose(self, logits: Tensor, rows: Tensor) -> Tensor:
        """[b] token ids for logits [b, V] of the prompts `rows` [b]."""
        chosen = logits.argmax(dim=-1)
        drawn = [place for place, row in enumerate(rows.tolist()) if row in self._generators]
        if not drawn:
            return chosen
        prompts = rows[drawn].tolist()
        numbers = [torch.rand((), generator=self._generators[row], dtype=torch.float64) for row in prompts]
        heat = torch.tensor([self._draws[row].temperature for row in prompts], device=logits.device)
        nucleus = torch.tensor([self._draws[row].top_p for row in prompts], device=logits.device)
        probabilities = (logits[drawn].float() / heat[:, None]).softmax(dim=-1)
        chosen[drawn] = _pick(probabilities, nucleus, torch.stack(numbers).to(logits.device))
        return chosen


def _pick(probabilities: Tensor, top_p: Tensor, numbers: Tensor) -> Tensor:
    """[b] tokens: where the running sum of the probabilities [b, V] passes `numbers` [b] of what is kept.

    top_p [b] keeps the fewest likeliest tokens that have so much together. Without it nothing is sorted,
    which would cost more than the draw.
    """
    order: Tensor | None = None
    if bool((top_p < 1).any()):
        probabilities, order = probabilities.sort(dim=-1, descending=True, stable=True)
    sums = probabilities.double().cumsum(dim=-1)
    if order is not None:
        kept = (sums - probabilities < top_p[:, None]).sum(dim=-1, keepdim=True)  # those before leave room
        total = sums.gather(1, kept - 1)
    else:
        total = sums[:, -1:]
    place = torch.searchsorted(sums, numbers[:, None] * total, right=True)
    place = place.clamp_(max=probabilities.shape[1] - 1)
    return (place if order is None else order.gather(1, place))[:, 0]
