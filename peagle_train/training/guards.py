"""A step whose loss or gradient is far from those before it: what was found, and which row it comes from.

    spike        loss > median + 10 * MAD of the last 100 losses, and > 1.1 * median
    explosion    gradient norm (before clipping) > 10 * median of the last 100 norms

MAD is the median of the distances from the median: unlike a variance, it does not grow by the outliers that
it is to find (10 MAD are 6.7 standard deviations of a normal distribution). The second condition is for
losses that hardly differ. Every finite step enters the statistics, skipped ones too: a loss that stays high
is after fifty steps no spike but where the training is. Before 20 steps nothing is judged.

A loss or a gradient that is not finite is no spike: it always ends the run, before it has changed a weight.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor

from peagle_train.errors import PeagleError
from peagle_train.store.source import StatesSource
from peagle_train.training.together import everywhere

NOT_FINITE = "not finite"
WINDOW = 100
LEAST = 20
LOSS_MADS, LOSS_SHARE = 10.0, 1.1
NORM_RATIO = 10.0


class SpikeGuard:
    """Running statistics of one training; a pure function of the losses and norms it was shown."""

    def __init__(self, state: dict[str, Any] | None = None):
        """state: what `state()` returned, of a training that goes on."""
        state = state or {"losses": [], "norms": []}
        self._losses: deque[float] = deque(state["losses"], WINDOW)
        self._norms: deque[float] = deque(state["norms"], WINDOW)

    def state(self) -> dict[str, Any]:
        """JSON; floats survive it to the last bit."""
        return {"losses": list(self._losses), "norms": list(self._norms)}

    def judge(self, loss: float, norm: float) -> str:
        """What is wrong with a step, in words; empty: nothing. Then takes its finite values in."""
        if not (math.isfinite(loss) and math.isfinite(norm)):
            return f"loss {loss}, gradient norm {norm}: {NOT_FINITE}"
        found = []
        if len(self._losses) >= LEAST:
            middle = median(self._losses)
            spread = median(abs(value - middle) for value in self._losses)
            limit = max(middle + LOSS_MADS * spread, LOSS_SHARE * middle)
            if loss > limit:
                found.append(f"loss {loss:.4g} (usual {middle:.4g}, limit {limit:.4g})")
            middle = median(self._norms)
            if norm > NORM_RATIO * middle:
                limit = NORM_RATIO * middle
                found.append(f"gradient norm {norm:.4g} (usual {middle:.4g}, limit {limit:.4g})")
        self._losses.append(loss)
        self._norms.append(norm)
        return " and ".join(found)


@dataclass(frozen=True)
class Culprits:
    """The rows of a step, and the one with the highest loss in words; empty where nobody can tell."""

    rows: list[int]
    worst: str

    def __str__(self) -> str:
        return f"Rows of the step: {self.rows}{'; ' if self.worst else ''}{self.worst}"


def culprits(
    accelerator: Accelerator, rows: Sequence[int], loss_of: Callable[[int], float] | None, store: StatesSource
) -> Culprits:
    """Looks for the row that a step went wrong by; every process calls it with its own rows.

    Args:
        loss_of: the mean loss of a row's elements under the present weights. It must need no other process:
            None where the weights are spread over them.
    """
    with torch.no_grad():
        mine = [(0.0 if loss_of is None else loss_of(row), row) for row in rows]
    found = [pair for part in everywhere(accelerator, lambda: mine) for pair in part]
    numbers = sorted(row for _, row in found)
    if loss_of is None:
        return Culprits(numbers, "")
    # NaN is worse than any number.
    loss, row = max(found, key=lambda pair: (math.isnan(pair[0]), pair[0], -pair[1]))
    info = store.info_of(row)
    return Culprits(
        numbers, f"worst: row {row} ({info.set} {info.id}, {info.shard}), loss {loss:.4g} per element"
    )


def refuse_nonfinite_weights(weights: Mapping[str, Tensor], step: int, untouched: str) -> None:
    """Raises PeagleError if a weight is NaN or infinite: such a head is neither kept as best nor saved.

    untouched: where the user finds what is good, in words.
    """
    for name, tensor in weights.items():
        # By its extremes, which NaN is one of: a mask of a whole table would be half as large as the table.
        if tensor.is_floating_point() and not all(map(math.isfinite, torch.aminmax(tensor))):
            raise PeagleError(
                f"step {step}: {name} is {NOT_FINITE} any more. Nothing was overwritten; {untouched}. Try a "
                "lower train.learning_rate, or train.precision: fp32."
            )
