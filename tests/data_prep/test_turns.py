"""Which turns are asked, in what way, and how sampled tokens are drawn."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch

from data_prep.answer import answer
from data_prep.chat import Asking, ChatRenderer, render_sets
from data_prep.prompts import Candidates, Message, Prompt
from data_prep.sampling import Chooser, Draw
from data_prep.turns import Way, asks_of, draw
from peagle_train.errors import PeagleError
from peagle_train.recipe.data import Sampling
from peagle_train.target.adapter import Target
from peagle_train.twin.models import TWINS
from peagle_train.twin.tokenizers import save_tokenizer

LETTERS = {"s": "system", "u": "user", "a": "assistant", "c": "assistant", "t": "tool"}


def turns(story: str) -> list[Message]:
    """A letter a turn; `c` is an assistant turn that calls a tool."""
    call = ({"name": "f", "arguments": {}},)
    return [
        Message(LETTERS[letter], f"{letter}{place}", None, call if letter == "c" else ())  # type: ignore[arg-type]
        for place, letter in enumerate(story)
    ]


@pytest.mark.parametrize(
    ("story", "asked"),
    [
        ("u", ["u0"]),
        ("su", ["s0 u1"]),
        ("suauau", ["s0 u1", "u3", "u5"]),
        ("uu", ["u0", "u1"]),
        ("suuau", ["s0 u1", "u2", "u4"]),
        ("uctau", ["u0 c1 t2", "u4"]),
        ("uctu", ["u0 c1 t2", "u3"]),
        ("uct", ["u0 c1 t2"]),
        ("uctctau", ["u0 c1 t2 c3 t4", "u6"]),
        ("uaact", ["u0", "c3 t4"]),
        ("saua", ["s0 u2"]),
        ("aau", ["u2"]),
        ("ucu", ["u0 c1 u2"]),
    ],
)
def test_every_question_is_asked_and_calls_stand_with_their_results(story: str, asked: list[str]) -> None:
    found = [" ".join(turn.content for turn in ask) for ask in asks_of(turns(story), "each")]
    assert found == asked
    assert [" ".join(turn.content for turn in ask) for ask in asks_of(turns(story), "last")] == [
        " ".join(turn.content for turn in turns(story))
    ]


WAYS = [
    Sampling(weight=3, temperature=0.7, top_p=0.9, template_variables={"effort": "low"}),
    Sampling(weight=1, template_variables={"effort": "high"}),
]


def test_ways_are_drawn_by_content_in_their_shares() -> None:
    drawn = [draw(WAYS, "train", f"text {n}") for n in range(2000)]
    low = [way for way in drawn if way.variables == {"effort": "low"}]
    assert 0.72 < len(low) / 2000 < 0.78
    assert set((way.temperature, way.top_p) for way in low) == {(0.7, 0.9)}
    assert drawn[::-1] == [draw(WAYS, "train", f"text {n}") for n in reversed(range(2000))]
    assert draw([], "train", "x") == Way()


def test_what_is_measured_is_greedy_with_the_drawn_variables() -> None:
    for n in range(20):
        train = draw(WAYS, "train", f"{n}")
        for name in ("validation", "mine"):
            assert draw(WAYS, name, f"{n}") == Way(variables=train.variables)


def test_ways_reach_the_template(tmp_path: Path) -> None:
    tokenizer = save_tokenizer(tmp_path, "qwen3", 448)
    ways = (
        Sampling(temperature=0.5, template_variables={"enable_thinking": False}),
        Sampling(template_variables={"enable_thinking": True}),
    )
    prompts = [Prompt(f"p{n}", (Message("user", f"Question {n}"),), f"{n}") for n in range(40)]
    held = [Prompt(f"h{n}", (Message("user", f"Held {n}"),), f"h{n}") for n in range(40)]
    sets = {"train": [Candidates(prompts, None)], "mine": [Candidates(held, None)]}
    renderer = ChatRenderer(tokenizer)
    rows, _ = render_sets(renderer, sets, shortest=0, longest=99, asking=Asking(sampling=ways, seed=3))
    silent = [tokenizer.decode(row.token_ids).endswith("</think>\n\n") for row in rows]
    counts = Counter((row.set, row.temperature, quiet) for row, quiet in zip(rows, silent, strict=True))
    assert set(counts) == {
        ("train", 0.5, True),
        ("train", 0.0, False),
        ("mine", 0.0, True),
        ("mine", 0.0, False),
    }
    again, _ = render_sets(
        renderer,
        {name: [Candidates(parts[0].prompts[::-1], None)] for name, parts in sets.items()},
        shortest=0,
        longest=99,
        asking=Asking(sampling=ways, seed=3),
    )
    assert {row.id: row.key for row in again} == {row.id: row.key for row in rows}
    wrong = Asking(sampling=(ways[0], Sampling(template_variables={"effort": "low"})))
    with pytest.raises(PeagleError, match=r"data\.sampling\.1\.template_variables\.effort: .*does not read"):
        render_sets(renderer, sets, shortest=0, longest=99, asking=wrong)


def test_draws_follow_the_distribution_and_stay_in_the_nucleus() -> None:
    logits, rows = torch.tensor([2.0, 1.0, 0.0, -1.0]), torch.arange(4000)
    for temperature, top_p, kept in (
        (1.0, 1.0, 4),
        (0.5, 1.0, 4),
        (1.0, 0.8, 2),
        (1.0, 0.01, 1),
        (2.0, 0.85, 3),
    ):
        chooser = Chooser([Draw(temperature, top_p, seed) for seed in range(4000)])
        drawn = chooser.choose(logits.expand(4000, 4), rows)
        wanted = (logits / temperature).softmax(0)
        wanted[kept:] = 0
        shares = drawn.bincount(minlength=4) / 4000
        torch.testing.assert_close(shares, wanted / wanted.sum(), atol=0.03, rtol=0)
        assert int((shares > 0).sum()) == kept


def test_a_nucleus_is_found_wherever_its_tokens_stand() -> None:
    logits = torch.tensor([[-1.0, 2.0, 0.0, 1.0], [5.0, 0.0, 0.0, 0.0]])
    chooser = Chooser([Draw(1.0, 0.8, 1), Draw()])
    drawn = [chooser.choose(logits, torch.tensor([0, 1])).tolist() for _ in range(200)]
    assert {first for first, _ in drawn} == {1, 3} and {second for _, second in drawn} == {0}


def test_a_row_says_the_same_in_any_batch(tmp_path: Path) -> None:
    target = Target.load(TWINS["llama"](tmp_path), dtype="float32", device="cpu")
    target.end_token_ids = tuple(range(40, 60))
    prompts = [[1, 40 + n, 50, 60 + n] for n in range(6)]
    draws = [Draw(1.0, 0.95, 10 + n) if n != 2 else Draw() for n in range(6)]

    def said(order: list[int]) -> dict[int, list[int]]:
        rows = answer(target, [prompts[n] for n in order], max_new_tokens=12, draws=[draws[n] for n in order])
        return {n: row.token_ids for n, row in zip(order, rows, strict=True)}

    whole = said([0, 1, 2, 3, 4, 5])
    for order in ([5, 3, 1], [2, 0, 4], [3]):
        part = said(order)
        assert part == {n: whole[n] for n in order}
    greedy = answer(target, [prompts[2]], max_new_tokens=12)[0].token_ids
    assert whole[2] == greedy
    assert len({len(tokens) for tokens in whole.values()}) > 1  # rows ended at different steps
    others = answer(target, prompts, max_new_tokens=12, draws=[Draw(1.0, 0.95, 99)] * 6)
    assert [row.token_ids for row in others] != [whole[n] for n in range(6)]
