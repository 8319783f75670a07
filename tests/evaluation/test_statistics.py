"""Figures about acceptance: intervals that hold what they say, shares, buckets."""

from __future__ import annotations

import random

import pytest

from peagle_train.evaluation.statistics import Interval, bootstrap, by_place, conditional
from peagle_train.head.acceptance import Acceptance, Round


def prompt(rng: random.Random, share: float) -> Acceptance:
    """Drafts of one token whose chance to hold differs from prompt to prompt around `share`."""
    mine, counts = rng.uniform(share - 0.3, share + 0.3), Acceptance(1)
    for _ in range(rng.randint(5, 40)):
        counts.add_round(int(rng.random() < mine))
    return counts


def test_nineteen_of_twenty_intervals_hold_the_truth() -> None:
    rng, held, tries = random.Random(0), 0, 200
    for n in range(tries):
        found = bootstrap([prompt(rng, 0.5) for _ in range(40)], draws=400, seed=n)
        assert found is not None and found.low < found.high
        held += found.low <= 1.5 <= found.high
    assert 0.90 <= held / tries <= 0.99


def test_drafts_of_one_prompt_are_not_taken_for_so_many_prompts() -> None:
    """Ten prompts of a thousand drafts are as unsure as ten prompts."""
    good, bad = Acceptance(1, 1000, [1000]), Acceptance(1, 1000, [0])
    found = bootstrap([good, bad] * 5)
    assert found is not None and found.high - found.low > 0.5
    assert found == bootstrap([good, bad] * 5)


def test_prompts_without_a_draft_count_for_nothing() -> None:
    one, two, none = Acceptance(2, 4, [2, 1]), Acceptance(2, 4, [3, 3]), Acceptance(2)
    found = bootstrap([one, two, none])
    assert found == bootstrap([one, two]) and isinstance(found, Interval) and found.prompts == 2
    assert bootstrap([one, none]) is None and bootstrap([]) is None


def test_a_share_of_those_that_got_there() -> None:
    assert conditional(Acceptance(3, 10, [8, 4, 1])) == [0.8, 0.5, 0.25]
    assert conditional(Acceptance(3, 10, [5, 0, 0])) == [0.5, 0.0, 0.0]
    assert conditional(Acceptance(2)) == [0.0, 0.0]


def test_drafts_are_sorted_by_their_place_in_the_answer() -> None:
    """The answer begins at token 10; its first draft predicts token 11, from anchor 9."""
    rounds = [Round(9, 2), Round(9 + 62, 0), Round(9 + 63, 1), Round(9 + 5000, 2)]
    found = by_place([(10, rounds), (5000, [Round(5001, 1)])], k=2)
    assert list(found) == [0, 64, 4096]
    assert found[0] == Acceptance(2, 3, [2, 1])  # places 1, 63, and 3 of the other answer
    assert found[64] == Acceptance(2, 1, [1, 0])
    assert found[4096] == Acceptance(2, 1, [1, 1])


def test_a_draft_before_the_answer_is_a_fault_of_the_caller() -> None:
    with pytest.raises(ValueError):
        by_place([(10, [Round(3, 0)])], k=1)
