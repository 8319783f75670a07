"""Gemma 4's conditional class computes what its text class does: what is proven of one holds for both.

tests/vllm serves the text class. vLLM's conditional class would want an image library that not every build
of torch goes with, so that one is compared here instead.
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle_train.evaluation.loop import greedy, speculate
from peagle_train.head.model import DrafterHead
from peagle_train.target.adapter import Target
from peagle_train.twin.models import tiny_gemma4, tiny_gemma4_multimodal
from tests.vllm.heads import make_head, train_briefly

TEXT, CONDITIONAL = "model.", "model.language_model."
AUX_LAYERS = (1, 3, 5)
K, ANSWER = 4, 24
PROMPTS = [[60, 7, 80, 9, 33], [100, 21, 47], [12, 90, 31, 54, 77, 18, 66, 40, 25, 83]]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, Target]:
    """The text twin, and a conditional twin of another seed that was given its text weights."""
    room = tmp_path_factory.mktemp("gemma4")
    text = tiny_gemma4(room / "text", seed=1)
    conditional = tiny_gemma4_multimodal(room / "conditional", seed=2)
    file = conditional / "model.safetensors"
    weights = load_file(file)
    given = {
        name.replace(TEXT, CONDITIONAL, 1): tensor
        for name, tensor in load_file(text / "model.safetensors").items()
    }
    assert set(given) == {name for name in weights if name.startswith(CONDITIONAL)}
    save_file({**weights, **given}, file, metadata={"format": "pt"})
    first, second = (Target.load(folder, dtype="float32", device="cpu") for folder in (text, conditional))
    return first, second


def test_they_are_two_classes_with_one_set_of_facts(pair: tuple[Target, Target]) -> None:
    text, conditional = (target.facts for target in pair)
    assert text.class_name == "Gemma4ForCausalLM"
    assert conditional.class_name == "Gemma4ForConditionalGeneration"
    assert replace(text, model=conditional.model, class_name=conditional.class_name) == conditional
    assert pair[0].end_token_ids == pair[1].end_token_ids


def test_states_and_distribution_are_the_same_bit_for_bit(pair: tuple[Target, Target]) -> None:
    ids = torch.randint(8, 380, (2, 21), generator=torch.Generator().manual_seed(0))
    every = range(pair[0].facts.num_layers + 1)
    text, conditional = (target.forward(ids, aux_layers=every) for target in pair)
    assert torch.equal(text.aux, conditional.aux) and torch.equal(text.last, conditional.last)
    chosen = torch.tensor([3, 40, 251])
    for token_ids in (None, chosen):
        mine, theirs = (target.distribution(text.last, token_ids) for target in pair)
        assert torch.equal(mine, theirs)
        heads = [target.output_head(token_ids)(text.last) for target in pair]
        assert torch.equal(*heads)


def fresh_head(target: Target) -> DrafterHead:
    return make_head(
        target,
        layers=2,
        aux_layers=AUX_LAYERS,
        draft_vocab_size=None,
        own_embeddings=True,
        initialise="target",
        seed=3,
    )


def test_a_head_starts_from_both_with_the_same_weights(pair: tuple[Target, Target]) -> None:
    first, second = (fresh_head(target).state_dict() for target in pair)
    for name, tensor in first.items():
        assert torch.equal(tensor, second[name]), name


def test_one_head_speculates_alike_beside_both(pair: tuple[Target, Target]) -> None:
    head = fresh_head(pair[0])
    rows = [(prompt, greedy(pair[0], prompt, ANSWER).token_ids[: ANSWER // 2]) for prompt in PROMPTS]
    train_briefly(head, pair[0], rows, K, steps=20)
    accepted = drafted = 0
    for prompt in PROMPTS:
        plain, theirs = (greedy(target, prompt, ANSWER) for target in pair)
        assert plain == theirs
        one, other = (speculate(target, head, prompt, K, ANSWER) for target in pair)
        assert one == other and one.token_ids == plain.token_ids
        accepted += one.acceptance.num_accepted
        drafted += K * one.acceptance.num_drafts
    assert 0 < accepted < drafted
