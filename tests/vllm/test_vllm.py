"""A real vLLM draws the same drafts, answers and counters as our own code."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from peagle_train.evaluation.loop import first_difference
from peagle_train.head.session import DraftSession
from tests.vllm.conftest import Case
from tests.vllm.matrix import SPECS, in_short_run

pytestmark = pytest.mark.vllm

ENGINES = [
    pytest.param(spec.name, marks=() if in_short_run(spec) else pytest.mark.slow, id=spec.name)
    for spec in SPECS
]
TIE = 1e-3  # two logits closer than this may swap places between two float32 implementations


@pytest.fixture(params=ENGINES)
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


@dataclass
class Comparison:
    drafts: int = 0
    tokens: int = 0
    ties: int = 0


def compare_drafts(case: Case) -> Comparison:
    """Every draft vLLM made for an unfinished request against our head's, from the same known tokens."""
    result = Comparison()
    target, aux_layers = case.ground.target, case.head.config.aux_layers
    answers, states = {}, {}
    for prompt, output in zip(case.ground.prompts, case.result["outputs"], strict=True):
        full = answers[tuple(prompt)] = [*prompt, *output]
        states[tuple(prompt)] = target.forward(torch.tensor([full[:-1]]), aux_layers=aux_layers).aux[0]
    for record in case.result["records"]:
        prompt, known = tuple(record["prompt"]), record["known"]
        full = answers[prompt]
        if len(known) >= len(full):
            continue  # drafted for a request that had just ended
        assert known == full[: len(known)], "vLLM drafted from tokens that are not those of the answer"
        tokens = torch.tensor(known)
        ours, logits = DraftSession(case.head).draft(
            tokens[1:], states[prompt][: len(known) - 1], case.spec.k
        )
        result.drafts += 1
        for position, (mine, theirs) in enumerate(zip(ours.tolist(), record["drafts"], strict=True)):
            result.tokens += 1
            if mine == theirs:
                continue
            best = logits[position].topk(2).values
            gap = float(best[0] - best[1])
            assert gap < TIE, (
                f"{case.spec.name}: after {len(known)} tokens, position {position}: vLLM drafts {theirs}, "
                f"our head {mine}, whose logit leads by {gap:.4f}"
            )
            result.ties += 1
    return result


def test_it_is_served_as_asked(case: Case) -> None:
    """Both formats, the speculators one by the head's path alone."""
    assert case.result["method"] == "eagle3"
    assert case.result["parallel_drafting"] is (case.head.config.method == "peagle")
    assert case.result["k"] == case.spec.k
    assert case.result["target"] == str(case.ground.folder)


def test_every_draft_token_is_our_heads(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    compared = compare_drafts(case)
    counters = case.result["counters"]
    # Every draft that vLLM verified was among those compared.
    assert compared.drafts == counters["drafts"] > 0
    assert compared.tokens == counters["draft_tokens"] == counters["drafts"] * case.spec.k
    with capsys.disabled():
        print(f"\n{case.spec.name}: {compared.tokens} drafts compared, {compared.ties} near ties", end="")
    assert compared.ties <= compared.tokens // 100


def test_drafts_are_rejected_and_by_a_trained_head_accepted(case: Case) -> None:
    counters = case.result["counters"]
    assert counters["accepted"] < counters["draft_tokens"]
    if case.spec.trained:
        assert counters["accepted"] > counters["drafts"] / 2


def test_the_answers_are_the_targets_greedy_ones(case: Case) -> None:
    """A first divergence is allowed only where the target's own two best logits are a near tie."""
    for output, plain in zip(case.result["outputs"], case.ground.plain, strict=True):
        at = first_difference(output, plain.token_ids)
        assert at is None or plain.gaps[at] < TIE, (
            f"{case.spec.name}: token {at} is {output[at : at + 1]}, greedy decoding gives "
            f"{plain.token_ids[at : at + 1]} with a lead of {plain.gaps[at]:.4f}"
        )


def test_the_counters_are_our_loops(case: Case) -> None:
    """vLLM counts accepted drafts past the end of an answer, so our loop was told to do the same."""
    counters = case.result["counters"]
    found = (counters["drafts"], counters["accepted"], counters["accepted_per_position"])
    assert found == (case.ours.num_drafts, case.ours.num_accepted, case.ours.accepted_at)


@pytest.mark.parametrize("case", ["SmolLM2-trained-4", "SmolLM2-trained-7"], indirect=True)
def test_some_answer_ends_early(case: Case) -> None:
    """The counters above cover an answer that ends before its length limit, with drafts past its end."""
    assert any(len(output) < case.ground.max_tokens for output in case.result["outputs"])
