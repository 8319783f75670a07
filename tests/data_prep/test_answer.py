"""Batched generation against the plainest one: a row at a time, no padding, no cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from data_prep.answer import answer
from data_prep.teacher_forcing import forced_states
from peagle_train.target.adapter import Target
from peagle_train.twin.models import TWINS

NEW = 12
HEADER = [1, 33, 34, 35, 36, 37, 38, 39, 2, 5]
PROMPTS = [
    [1, 40, 41, 42, 43, 44, 45, 46, 47, 48, 49, 50],
    [1, 60, 61],
    [1, 9, 9, 70, 8],
    [30],
    [1, 80, 20, 30, 7, 90],
]


@pytest.fixture(scope="module")
def make(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Target]:
    loaded: dict[str, Target] = {}

    def target(kind: str) -> Target:
        if kind not in loaded:
            folder: Path = TWINS[kind](tmp_path_factory.mktemp(kind))
            loaded[kind] = Target.load(folder, dtype="float32", device="cpu")
        loaded[kind].end_token_ids = ()
        return loaded[kind]

    return target


def plain(target: Target, prompt: list[int]) -> list[int]:
    """Greedy decoding that recomputes everything at every step."""
    ids = list(prompt)
    for _ in range(NEW):
        last = target.forward(torch.tensor([ids]), aux_layers=()).last[0, -1]
        ids.append(int(target.logits(last).argmax()))
        if ids[-1] in target.end_token_ids:
            break
    return ids


@pytest.mark.parametrize("header", [[], HEADER], ids=["nothing_shared", "header_shared"])
@pytest.mark.parametrize("kind", sorted(TWINS))
def test_batched_answers_and_states_equal_row_by_row(
    make: Callable[[str], Target], kind: str, header: list[int]
) -> None:
    target = make(kind)
    prompts = [header + prompt for prompt in PROMPTS]
    # End tokens that the twin really emits, so that rows leave the batch at different steps.
    free = [plain(target, prompt) for prompt in prompts]
    target.end_token_ids = (free[0][len(prompts[0]) + 4], free[1][len(prompts[1])])
    layers = (0, 2, target.facts.num_layers)
    found = answer(target, prompts, max_new_tokens=NEW, aux_layers=layers, keep=torch.float32)
    for prompt, row in zip(prompts, found, strict=True):
        assert row.token_ids == plain(target, prompt)
        assert row.prompt_length == len(prompt)
        ended = row.token_ids[-1] in target.end_token_ids
        assert row.finish == ("stop" if ended else "length")
        assert ended or len(row.token_ids) == len(prompt) + NEW
        whole = target.forward(torch.tensor([row.token_ids[:-1]]), aux_layers=layers)
        assert row.aux is not None and row.last is not None
        torch.testing.assert_close(row.aux, whole.aux[0], atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(row.last, whole.last[0], atol=2e-5, rtol=1e-4)
    assert len({len(row.token_ids) - row.prompt_length for row in found}) > 1


@pytest.mark.parametrize("kind", ["llama", "gpt_oss", "gemma4"])
def test_teacher_forced_states_equal_the_kept_ones(make: Callable[[str], Target], kind: str) -> None:
    target = make(kind)
    kept = answer(target, PROMPTS, max_new_tokens=NEW, aux_layers=(1, 3), keep=torch.float32)
    forced = forced_states(target, [row.token_ids for row in kept], (1, 3), torch.float32)
    for row, (aux, last) in zip(kept, forced, strict=True):
        assert row.aux is not None and row.last is not None
        assert aux.shape == (len(row.token_ids) - 1, 2 * target.facts.hidden_size)
        torch.testing.assert_close(aux, row.aux, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(last, row.last, atol=2e-5, rtol=1e-4)


def test_an_answer_of_the_end_token_alone(make: Callable[[str], Target]) -> None:
    target = make("llama")
    target.end_token_ids = (plain(target, PROMPTS[1])[len(PROMPTS[1])],)
    row = answer(target, [PROMPTS[1]], max_new_tokens=NEW, aux_layers=(1,), keep=torch.float32)[0]
    assert (len(row.token_ids) - row.prompt_length, row.finish) == (1, "stop")
    assert row.last is not None and row.last.shape[0] == len(PROMPTS[1])


def test_what_all_prompts_begin_with_is_fed_once(
    make: Callable[[str], Target], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = make("llama")
    fed: list[int] = []
    forward = target.forward

    def counted(input_ids: torch.Tensor, **settings: Any) -> Any:
        fed.append(input_ids.numel())
        return forward(input_ids, **settings)

    monkeypatch.setattr(target, "forward", counted)
    prompts = [HEADER + prompt for prompt in PROMPTS]
    answer(target, prompts, max_new_tokens=1)
    assert fed == [len(HEADER), len(PROMPTS) * max(len(prompt) for prompt in PROMPTS)]
    fed.clear()
    answer(target, [prompts[0], prompts[0]], max_new_tokens=1)
    assert fed == [len(prompts[0]) - 1, 2]


def test_no_states_unless_asked_and_every_token_reported(make: Callable[[str], Target]) -> None:
    target, reported = make("llama"), []
    rows = answer(target, PROMPTS, max_new_tokens=3, on_tokens=reported.append)
    assert all(row.aux is None and row.last is None for row in rows)
    assert sum(reported) == sum(len(row.token_ids) - row.prompt_length for row in rows) == 15


def test_states_are_kept_in_the_dtype_asked_for(make: Callable[[str], Target]) -> None:
    target = make("llama")
    full = answer(target, PROMPTS, max_new_tokens=3, aux_layers=(2,), keep=torch.float32)
    half = answer(target, PROMPTS, max_new_tokens=3, aux_layers=(2,), keep=torch.bfloat16)
    for a, b in zip(full, half, strict=True):
        assert a.aux is not None and b.aux is not None
        assert torch.equal(a.aux.to(torch.bfloat16), b.aux)
