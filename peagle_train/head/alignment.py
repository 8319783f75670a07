"""Which token predicts which: the one place where positions are shifted.

A row has tokens x[0..n-1]. h[i] is the target's hidden state after reading x[i].

    slot i        reads the embedding of x[i+1] and the state h[i], sits at RoPE position i,
                  and predicts x[i+2]
    element (a,d) is slot a for d = 0. For d >= 1 it lies d steps further: it sits at position a+d and
                  predicts x[a+2+d], whose distribution is the target's output at position a+1+d.
                  What it reads is the method's: peagle's mask slot the mask embedding and
                  `mask_hidden`, eagle3's step the embedding of x[a+1+d], which the element before
                  it predicted, and that element's own state

Example, an answer generated at positions 5..9 (E ends the turn):

    position   0   1   2   3   4   5   6   7   8   9
    x          p   p   p   p   p   A   B   C   D   E
    mask       .   .   .   .   .   1   1   1   1   1

    slot 4 = (x[5]=A, h[4])   drafts B   (4,1) drafts C   (4,2) drafts D   (4,3) drafts E
    slot 5 = (x[6]=B, h[5])   drafts C   (5,1) drafts D   (5,2) drafts E
    slot 6 = (x[7]=C, h[6])   drafts D   (6,1) drafts E
    slot 7 = (x[8]=D, h[7])   drafts E

x[5] comes from the target's prefill: a server first drafts when it is known, at slot 4. So depth 0
is trained on the labels 6..9, nothing is ever drafted by a slot inside the prompt, and no chain
looks past the turn it starts in.
"""

from __future__ import annotations

import torch
from torch import Tensor

EMBEDDED = 1
"""Slot i embeds x[i + EMBEDDED]; so does, at its position i = a + d, the step (a, d) of an unroll."""

PREDICTED = 2
"""Element (a, d) predicts x[a + d + PREDICTED]."""

TARGET_OUTPUT = 1
"""The target's distribution for that label is its output at position a + d + TARGET_OUTPUT."""


def turn_ends(loss_mask: Tensor) -> Tensor:
    """For every generated token the position just after its turn; 0 elsewhere.

    Args:
        loss_mask: [n] bool, true where the token was generated. Turns are separated by at least one
            token that was not (every chat template has a header there).

    Returns:
        [n] int64.
    """
    n = loss_mask.shape[0]
    positions = torch.arange(n)
    # The next position at or after t that is not generated: a running minimum from the right.
    stops = torch.where(loss_mask, n, positions)
    ends = torch.flip(torch.cummin(torch.flip(stops, [0]), 0).values, [0])
    return torch.where(loss_mask, ends, 0)


def trainable_depths(loss_mask: Tensor) -> Tensor:
    """How many elements of each slot's chain carry loss: (a, d) is trained iff d < result[a].

    A chain is trained while x[a+1] and its label x[a+2+d] are generated tokens of one turn, which
    makes the trainable depths of an anchor a prefix 0..m-1, so a count says it all.

    Args:
        loss_mask: [n] bool, true where the token was generated.

    Returns:
        [n - 1] int64, one entry per slot (slot n-2 predicts x[n], so its count is 0).
    """
    ends = turn_ends(loss_mask)[EMBEDDED:]
    slots = torch.arange(loss_mask.shape[0] - 1)
    return torch.clamp(ends - (slots + PREDICTED), min=0)


def needed_states(loss_mask: Tensor) -> tuple[int, Tensor]:
    """Which of the target's states a row's training and evaluation read.

    Real slots are seen up to the row's last trainable anchor. Elements that share a + d share label and
    target output, and (a, d) is trained only where (a + d, 0) is: so the outputs that give some label its
    distribution are those of the trainable anchors, at the positions p where x[p] and x[p+1] are generated
    tokens of one turn.

    Args:
        loss_mask: [n] bool, true where the token was generated.

    Returns:
        S, the number of slots, and the positions [P] int64 of those outputs, rising.
    """
    anchors = trainable_depths(loss_mask).nonzero()[:, 0]
    return int(anchors[-1]) + 1 if len(anchors) else 0, anchors + TARGET_OUTPUT
