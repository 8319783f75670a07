"""Sizes that are known without the Hub: read as a config.json is, and owned up to."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from peagle_train.recipe.schema import TargetSection
from peagle_train.target.facts import KVLayer, TargetFacts
from peagle_train.target.known import describe_or_known, known
from peagle_train.target.source import TargetNotFoundError
from peagle_train.twin.models import tiny_llama

SIZES = {  # class, layers, hidden, heads, KV heads, head width, vocabulary, context
    "openai/gpt-oss-20b": ("GptOssForCausalLM", 24, 2880, 64, 8, 64, 201_088, 131_072),
    "openai/gpt-oss-120b": ("GptOssForCausalLM", 36, 2880, 64, 8, 64, 201_088, 131_072),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": ("Qwen3MoeForCausalLM", 48, 2048, 32, 4, 128, 151_936, 262_144),
    "google/gemma-4-31B-it": ("Gemma4ForConditionalGeneration", 60, 5376, 32, 16, 256, 262_144, 262_144),
}


def facts_of(model: str) -> TargetFacts:
    entry = known(model)
    assert entry is not None
    return entry.facts()


@pytest.mark.parametrize("model", SIZES)
def test_the_sizes_are_those_of_the_models(model: str) -> None:
    facts = facts_of(model)
    found = (
        facts.class_name,
        facts.num_layers,
        facts.hidden_size,
        facts.num_attention_heads,
        facts.num_key_value_heads,
        facts.head_dim,
        facts.vocab_size,
        facts.max_position_embeddings,
    )
    assert found == SIZES[model]


def test_layers_and_rope_are_read_as_from_a_config() -> None:
    gemma, oss = facts_of("google/gemma-4-31B-it"), facts_of("openai/gpt-oss-20b")
    assert Counter(gemma.kv_layers) == {KVLayer(1024, 16, 256): 50, KVLayer(None, 4, 512): 10}
    assert gemma.kv_layers[5] == KVLayer(None, 4, 512)
    assert (gemma.rope_theta, gemma.logit_softcap, gemma.tie_word_embeddings) == (1e6, 30.0, True)
    assert [layer.window for layer in oss.kv_layers] == [128, None] * 12
    assert oss.rope_scaling is not None and oss.rope_scaling["factor"] == 32.0
    assert facts_of("Qwen/Qwen3-Coder-30B-A3B-Instruct").rope_theta == 1e7


def test_a_target_that_cannot_be_had_is_planned_from_here_and_said_so() -> None:
    facts, note = describe_or_known(TargetSection(model="openai/gpt-oss-20b"))
    assert facts == facts_of("openai/gpt-oss-20b")
    assert note is not None and "the config.json of openai/gpt-oss-20b cannot be had here" in note
    with pytest.raises(TargetNotFoundError, match="some/other"):
        describe_or_known(TargetSection(model="some/other"))


def test_a_config_that_is_there_is_the_one_that_counts(tmp_path: Path) -> None:
    facts, note = describe_or_known(TargetSection(model=str(tiny_llama(tmp_path / "target"))))
    assert (facts.num_layers, note) == (4, None)
