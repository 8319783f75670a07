"""What only the target can refuse: all at once, from its config alone."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from peagle_train.errors import RecipeError
from peagle_train.head.rope import Rope
from peagle_train.recipe import check_against_target, read_recipe
from peagle_train.recipe.head import head_rope
from peagle_train.recipe.schema import HeadSection
from peagle_train.target.facts import KVLayer, TargetFacts
from tests.recipe.test_load import GOOD

FACTS = TargetFacts(
    model="some/model",
    class_name="LlamaForCausalLM",
    num_layers=4,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=6,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=500,
    max_position_embeddings=1024,
    rope_theta=1e4,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    logit_softcap=None,
)


def faults_of(tmp_path: Path, *overrides: str, facts: TargetFacts = FACTS) -> list[str]:
    path = tmp_path / "tiny.yaml"
    path.write_text(GOOD)
    loaded = read_recipe(path, overrides)
    with pytest.raises(RecipeError) as caught:
        check_against_target(loaded.recipe, facts, str(path), loaded.places)
    return caught.value.faults


def test_a_recipe_at_every_limit_passes(tmp_path: Path) -> None:
    path = tmp_path / "tiny.yaml"
    path.write_text(GOOD)
    loaded = read_recipe(
        path,
        [
            "head.aux_layers=[0,4]",
            "head.draft_vocab_size=500",
            "head.mask_token=499",
            "head.max_position_embeddings=1024",
            "head.num_attention_heads=4",
            "data.max_prompt_tokens=1000",
            "data.max_new_tokens=24",
        ],
    )
    check_against_target(loaded.recipe, FACTS, str(path))


@pytest.mark.parametrize(
    ("override", "fault"),
    [
        (
            "head.aux_layers=[2,5,7]",
            "head.aux_layers: found 5, 7; expected at most 4, because some/model has 4 decoder layers",
        ),
        (
            "head.draft_vocab_size=501",
            "head.draft_vocab_size: found 501; expected at most 500, the vocabulary of some/model; "
            "leave it out for the whole vocabulary",
        ),
        (
            "head.mask_token=500",
            "head.mask_token: found id 500; expected less than 500, because some/model has no such "
            "row and vLLM does not notice; name an unused token, or write `unused` to find one",
        ),
        (
            "head.max_position_embeddings=512",
            "head.max_position_embeddings: found 512; expected at least the 1024 of some/model, "
            "because the server drafts up to the target's full context; leave it out to take the "
            "target's",
        ),
        (
            "head.num_key_value_heads=4",
            "head.num_key_value_heads: found 6 query heads for 4 key-value heads (what the recipe "
            "leaves out is the target's); expected a multiple, because query heads share key-value "
            "heads in equal groups",
        ),
        (
            "head.num_attention_heads=5",
            "head.num_attention_heads: found 5 query heads for 2 key-value heads (what the recipe "
            "leaves out is the target's); expected a multiple, because query heads share key-value "
            "heads in equal groups",
        ),
        (
            "head.layers=5",
            "head.layers: found 5; expected at most the 4 of some/model, whose last layers the head starts "
            "from; use fewer, or `initialise: random`",
        ),
        (
            "head={aux_layers: [1, 2], mask_token: 3, hidden_size: 48, output: frozen}",
            "head.output: found frozen in a head of width 48; expected trained, because the output rows of "
            "some/model are 64 wide and cannot be copied; write `output: trained`, or leave hidden_size out",
        ),
        (
            "head.head_dim=15",
            "head.head_dim: found 15; expected an even number, because RoPE turns pairs of channels",
        ),
        (
            "data.max_new_tokens=769",
            "data.max_new_tokens: found 256 prompt + 769 new tokens = 1025; expected at most 1024, "
            "the context of some/model; lower one of the two",
        ),
    ],
)
def test_one_fault_one_message(tmp_path: Path, override: str, fault: str) -> None:
    assert faults_of(tmp_path, override) == [f"command line: {fault}"]


def test_a_fault_of_the_target_itself_is_found(tmp_path: Path) -> None:
    odd = dataclasses.replace(FACTS, head_dim=15)
    assert faults_of(tmp_path, facts=odd) == [
        f"{tmp_path / 'tiny.yaml'}:9: head.head_dim: found 15; expected an even number, because RoPE turns "
        "pairs of channels"
    ]


def test_all_faults_at_once_with_lines(tmp_path: Path) -> None:
    small = dataclasses.replace(FACTS, num_layers=1, vocab_size=3, max_position_embeddings=100)
    faults = faults_of(tmp_path, "head.draft_vocab_size=4", facts=small)
    where = [fault.replace(str(tmp_path / "tiny.yaml"), "FILE").split(": ")[:2] for fault in faults]
    assert where == [
        ["FILE:4", "data.max_new_tokens"],
        ["FILE:9", "head.layers"],  # left out, so its default of 4 is more than this target has
        ["FILE:10", "head.aux_layers"],
        ["FILE:11", "head.mask_token"],
        ["command line", "head.draft_vocab_size"],
    ]


YARN = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 512, "truncate": False}


def head_of(tmp_path: Path, *overrides: str) -> HeadSection:
    path = tmp_path / "tiny.yaml"
    path.write_text(GOOD)
    return read_recipe(path, overrides).recipe.head


def test_the_rope_is_the_targets_unless_named(tmp_path: Path) -> None:
    stretched = dataclasses.replace(FACTS, rope_theta=5e4, rope_scaling=YARN)
    assert head_rope(head_of(tmp_path), FACTS) == Rope(1e4)
    assert head_rope(head_of(tmp_path), stretched) == Rope.from_parameters(5e4, YARN)
    assert head_rope(head_of(tmp_path, "head.rope.rope_type=default"), stretched) == Rope(5e4)
    named = head_of(tmp_path, "head.rope={rope_type: linear, rope_theta: 1.0e6, factor: 4.0}")
    assert head_rope(named, stretched) == Rope(1e6, "linear", factor=4.0)


def test_a_rope_no_drafter_computes_is_refused_with_the_cure(tmp_path: Path) -> None:
    gemma = dataclasses.replace(
        FACTS, rope_scaling={"rope_type": "proportional", "partial_rotary_factor": 0.25}
    )
    (fault,) = faults_of(tmp_path, facts=gemma)
    assert "head.rope: found" in fault and "proportional" in fault
    assert "`rope: {rope_type: default}` is plain RoPE" in fault
    (fault,) = faults_of(tmp_path, "head.rope.factor=2.0")
    assert "factor beside rope_type target" in fault


def test_yarn_must_reach_the_longest_context(tmp_path: Path) -> None:
    short = {**YARN, "original_max_position_embeddings": 256}
    (fault,) = faults_of(tmp_path, facts=dataclasses.replace(FACTS, rope_scaling=short))
    assert "= 512; expected at least 1024" in fault


def test_a_head_of_another_width_cannot_share_the_targets_table(tmp_path: Path) -> None:
    (fault,) = faults_of(tmp_path, "head.hidden_size=48", "head.embeddings=shared")
    assert "head.hidden_size: found 48; expected 64" in fault


def test_a_window_that_vllm_cannot_serve_beside_the_targets(tmp_path: Path) -> None:
    kinds = "[sliding_attention, full_attention, full_attention, full_attention]"
    hybrid = dataclasses.replace(FACTS, kv_layers=(KVLayer(32, 2, 16), KVLayer(None, 2, 16)) * 2)
    (fault,) = faults_of(tmp_path, f"head.layer_types={kinds}", "head.sliding_window=64", facts=hybrid)
    assert "head.sliding_window: found windows of 32 and 64 in head and target" in fault
