"""Hidden states of rows whose tokens are already known, in one pass each batch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle_train.target.adapter import Target


@torch.no_grad()
def forced_states(
    target: Target, rows: Sequence[Sequence[int]], aux_layers: Sequence[int], keep: torch.dtype
) -> list[tuple[Tensor, Tensor]]:
    """Per row of n tokens: aux [n-1, A*H] and last [n-1, H], in `keep` on the CPU.

    Rows are padded on the right, where causal attention needs no mask: no token sees what follows it.
    """
    width = max(len(row) for row in rows) - 1
    ids = torch.zeros(len(rows), width, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row) - 1] = torch.tensor(row[:-1])
    tapped = target.forward(ids.to(target.device), aux_layers=aux_layers)
    aux, last = tapped.aux.to("cpu", keep), tapped.last.to("cpu", keep)
    return [(aux[index, : len(row) - 1], last[index, : len(row) - 1]) for index, row in enumerate(rows)]
