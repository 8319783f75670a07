"""Hidden states of rows whose tokens are already known, in passes of bounded size.

A batch of answers may be far too large for one pass: 32 rows of 10,000 tokens. Rows of like length go
together, at most `batch_tokens` with their padding; a longer row has a pass of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from peagle_train.target.adapter import Target


@torch.no_grad()
def forced_states(
    target: Target,
    rows: Sequence[Sequence[int]],
    aux_layers: Sequence[int],
    keep: torch.dtype,
    batch_tokens: int | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> list[tuple[Tensor, Tensor]]:
    """Per row of n tokens: aux [n-1, A*H] and last [n-1, H], in `keep` on the CPU.

    Rows are padded on the right, where causal attention needs no mask: no token sees what follows it.
    batch_tokens: most tokens of one pass; left out: all rows in one.
    on_tokens: called after every pass with the tokens of its rows.
    """
    found: list[tuple[Tensor, Tensor] | None] = [None] * len(rows)
    lengths = [len(row) - 1 for row in rows]  # the last token is not fed
    for batch in cut(lengths, batch_tokens or sum(lengths) * len(rows)):
        ids = torch.zeros(len(batch), lengths[batch[0]], dtype=torch.long)
        for place, index in enumerate(batch):
            ids[place, : lengths[index]] = torch.tensor(rows[index][:-1])
        tapped = target.forward(ids.to(target.device), aux_layers=aux_layers)
        aux, last = _begin_copy(tapped.aux, keep), _begin_copy(tapped.last, keep)
        for place, index in enumerate(batch):
            found[index] = (aux[place, : lengths[index]], last[place, : lengths[index]])
        if on_tokens is not None:
            on_tokens(sum(len(rows[index]) for index in batch))
    if target.device.type == "cuda":
        torch.cuda.synchronize(target.device)  # until here the copies may be on their way
    return [states for states in found if states is not None]


def _begin_copy(states: Tensor, keep: torch.dtype) -> Tensor:
    """`states` in `keep` on the CPU; from a GPU they arrive while the next pass is computed."""
    if states.device.type != "cuda":
        return states.to("cpu", keep)
    copy = torch.empty(states.shape, dtype=keep, pin_memory=True)
    return copy.copy_(states.to(keep), non_blocking=True)


def cut(lengths: Sequence[int], batch_tokens: int) -> list[list[int]]:
    """Indices of the rows of each pass, those of like length together, the longest first.

    batch_tokens: most tokens of one, padding counted; a longer row is alone.
    """
    batches: list[list[int]] = []
    width = 0
    for index in sorted(range(len(lengths)), key=lambda index: (-lengths[index], index)):
        if not batches or width * (len(batches[-1]) + 1) > batch_tokens:
            batches.append([])
            width = lengths[index]
        batches[-1].append(index)
    return batches
