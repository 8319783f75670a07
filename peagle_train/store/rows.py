"""One row of states: what is kept of it, how many bytes that is, and whether its numbers are finite.

A row has n tokens. Whoever makes its states has one of each after every token but the last; what training and
evaluation ever read of them is less, and `cut_row` keeps exactly that:

    position    0  1  2  3  4  5  6  7  8  9       the answer A..E generated at 5..9
    token       p  p  p  p  p  A  B  C  D  E
    aux         x  x  x  x  x  x  x  x  .  .       slots up to the last trainable anchor, which sees all
    last        .  .  .  .  .  x  x  x  x  .       where this and the next token are generated, in one turn

Why these: head/alignment.py. `last` of the prompt gives no label its distribution; the first generated token
comes from the target's prefill.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from peagle_train.errors import CorruptError
from peagle_train.head.alignment import needed_states

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

ID_BYTES = 4
"""Token ids are stored as int32."""


@dataclass(frozen=True)
class StateRow:
    """One row: n tokens and states of the target.

    As made, aux and last have the states after the first n - 1 tokens. As stored they are cut: aux has the
    first S tokens, last those at the positions `last_at`.
    """

    row: int
    set: str
    id: str
    token_ids: Tensor  # [n] int64
    loss_mask: Tensor  # [n] bool
    aux: Tensor  # [n-1, A*H]; cut: [S, A*H]
    last: Tensor  # [n-1, H], before the final norm; cut: [P, H]
    prompt_length: int
    last_at: Tensor | None = None  # [P] int64, rising; None: the row is not cut


@dataclass(frozen=True)
class RowInfo:
    """What is known of a row without reading its tensors."""

    row: int
    set: str
    id: str
    tokens: int  # n
    supervised: int  # generated tokens; below 2 the row has no trainable chain
    prompt_length: int
    shard: str


def cut_row(row: StateRow) -> StateRow:
    """The row with the states that somebody reads, and no others; one that is cut already as it is."""
    if row.last_at is not None:
        return row
    slots, outputs = needed_states(row.loss_mask)
    return replace(row, aux=row.aux[:slots], last=row.last[outputs], last_at=outputs)


def stored_bytes(loss_mask: Tensor, aux_count: int, hidden_size: int, dtype: str) -> int:
    """Bytes of a row's token ids and states in the store: exact.

    Args:
        loss_mask: [n] bool.
    """
    slots, outputs = needed_states(loss_mask)
    return _bytes(len(loss_mask), slots, len(outputs), aux_count, hidden_size, dtype)


def stored_bytes_at_most(tokens: int, generated: int, aux_count: int, hidden_size: int, dtype: str) -> int:
    """As `stored_bytes` for a row of at most so many tokens, of which so many are generated.

    Exact if they are the last ones, in one turn; several turns need less.
    """
    if generated < 2:
        return tokens * ID_BYTES
    return _bytes(tokens, tokens - 2, generated - 1, aux_count, hidden_size, dtype)


def bytes_per_token(aux_count: int, hidden_size: int, dtype: str) -> int:
    """Bytes a generated token takes on the disk, its states and its id; one of the prompt has no `last`."""
    return _bytes(1, 1, 1, aux_count, hidden_size, dtype)


def _bytes(tokens: int, slots: int, outputs: int, aux_count: int, hidden_size: int, dtype: str) -> int:
    return (slots * aux_count + outputs) * hidden_size * DTYPES[dtype].itemsize + tokens * ID_BYTES


class NotFiniteError(CorruptError):
    """A row whose states hold NaN or Inf; `fault` says so without the cure."""

    def __init__(self, fault: str):
        super().__init__(
            f"{fault}; move the folder away and make the states anew with `peagle extract RECIPE`, or set "
            "train.skip_bad_rows=true to train without such rows"
        )
        self.fault = fault


def require_finite(row: StateRow, where: str) -> StateRow:
    """The row itself; raises NotFiniteError, naming `where` and tensor, if its states hold NaN or Inf."""
    for name in ("aux", "last"):
        states = getattr(row, name)
        if states.numel() and not all(math.isfinite(value) for value in torch.aminmax(states)):
            bad = (~torch.isfinite(states)).any(-1).nonzero()[:, 0]
            positions = row.last_at[bad] if name == "last" and row.last_at is not None else bad
            raise NotFiniteError(
                f"{where} ({row.set} {row.id}): {name} holds NaN or Inf at {len(bad)} of "
                f"{states.shape[0]} tokens, first at token {int(positions[0])}"
            )
    return row
