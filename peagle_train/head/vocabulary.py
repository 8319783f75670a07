"""The reduced draft vocabulary: which of the target's tokens the head can draft.

Chosen once, from how often each token carries loss in the training rows; the map then travels with
the weights. Recomputing it later would renumber every row of `lm_head`.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

ROWS_AT_ONCE = 256
"""Rows whose tokens are counted together."""


@dataclass(frozen=True)
class DraftVocabulary:
    """token_ids [DV] rising target ids; coverage: share of counts on them; seen: distinct tokens counted."""

    token_ids: Tensor
    coverage: float
    seen: int


def count_supervised(rows: Iterable[tuple[Tensor, Tensor]], vocab_size: int) -> Tensor:
    """How often each token is generated. rows: (token_ids [n], loss_mask [n]). Returns [V] int64."""
    counts = torch.zeros(vocab_size, dtype=torch.int64)
    generated = (token_ids[loss_mask] for token_ids, loss_mask in rows)
    while some := list(islice(generated, ROWS_AT_ONCE)):  # a count per row would cost the vocabulary's size
        counts += torch.bincount(torch.cat(some), minlength=vocab_size)
    return counts


def choose_draft_vocabulary(
    counts: Tensor, size: int, *, always: Iterable[int], never: Iterable[int]
) -> DraftVocabulary:
    """The `size` most frequent tokens.

    When fewer distinct tokens were counted than asked for, the rest are the lowest target ids not yet
    in: byte-pair vocabularies number tokens by the order of their merges, so low ids are the common ones.

    Args:
        counts: [V] how often each token carries loss.
        size: tokens to choose, at most V less the forbidden ones.
        always: ids that must be in (end tokens).
        never: ids that must not (the mask token).

    Raises:
        ValueError: the size cannot be met.
    """
    vocab_size = counts.shape[0]
    forbidden = set(never)
    first = [t for t in dict.fromkeys(always) if t not in forbidden]
    if not len(first) <= size <= vocab_size - len(forbidden):
        raise ValueError(
            f"a draft vocabulary of {size} must hold {len(first)} end tokens and fit into "
            f"{vocab_size} tokens less {len(forbidden)} forbidden ones"
        )
    # Sorted by count, ties by id: the order does not depend on the sorting algorithm.
    order = torch.argsort(-counts, stable=True).tolist()
    taken = set(first)
    chosen = list(first)
    for token in order:
        if len(chosen) == size:
            break
        if token not in taken and token not in forbidden:
            chosen.append(token)
    token_ids = torch.tensor(sorted(chosen), dtype=torch.int64)
    total = int(counts.sum())
    coverage = float(counts[token_ids].sum()) / total if total else 0.0
    return DraftVocabulary(token_ids, coverage, int((counts > 0).sum()))
