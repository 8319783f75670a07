"""Which token predicts which."""

from __future__ import annotations

import random

import torch

from peagle_train.head.alignment import trainable_depths, turn_ends


def mask_of(n: int, *spans: tuple[int, int]) -> torch.Tensor:
    mask = torch.zeros(n, dtype=torch.bool)
    for start, end in spans:
        mask[start:end] = True
    return mask


def test_the_drawn_example() -> None:
    """Answer at 5..9: slots 4..7 are trained, their labels are 6..9, and x[5] is never drafted."""
    depths = trainable_depths(mask_of(10, (5, 10)))
    assert depths.tolist() == [0, 0, 0, 0, 4, 3, 2, 1, 0]
    labels = sorted({a + 2 + d for a, m in enumerate(depths.tolist()) for d in range(m)})
    assert labels == [6, 7, 8, 9]


def test_no_slot_inside_the_prompt_and_none_at_minus_one() -> None:
    """An answer from the very first token: its first drafting slot would be -1, which does not exist."""
    assert trainable_depths(mask_of(4, (0, 4))).tolist() == [2, 1, 0]
    assert trainable_depths(mask_of(4, (3, 4))).tolist() == [0, 0, 0]
    assert trainable_depths(mask_of(4)).tolist() == [0, 0, 0]


def test_equals_the_definition_on_random_masks() -> None:
    rng = random.Random(0)
    for _ in range(300):
        n = rng.randint(2, 20)
        mask = torch.tensor([rng.random() < 0.7 for _ in range(n)])
        depths = trainable_depths(mask)
        for a in range(n - 1):
            for d in range(n + 2):
                label = a + 2 + d
                one_turn = label < n and all(mask[t] for t in range(a + 1, label + 1))
                assert (d < depths[a]) == bool(one_turn), (mask, a, d)


def test_turn_ends() -> None:
    assert turn_ends(mask_of(8, (1, 3), (5, 8))).tolist() == [0, 3, 3, 0, 0, 8, 8, 8]
