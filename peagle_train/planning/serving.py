"""Whether vLLM can serve the head that a recipe describes, beside its target.

Refusals that a recipe's own checks make (aux layers, windows, a RoPE that no drafter has) come before this;
here stands what is left to tell: versions, the KV cache rule, the flag it may need.
"""

from __future__ import annotations

from dataclasses import dataclass

from peagle_train.export.serving import kv_layers, serving_flags
from peagle_train.head.config import HeadConfig
from peagle_train.recipe.schema import Recipe
from peagle_train.target.facts import TargetFacts
from peagle_train.target.kv_groups import groups_of_head

RUN_WITH = "0.32.0"
"""The vLLM that `make test-vllm` runs, with every class below."""

_PARALLEL = "vLLM 0.16 or newer, the first with parallel drafting (vllm-project/vllm#32887)"
_GROUPED = (
    "a vLLM with parallel drafting (0.16, vllm-project/vllm#32887) and a KV cache group for the head beside "
    "a hybrid target (vllm-project/vllm#35062, March 2026)"
)
_GEMMA4 = "vLLM 0.22 or newer; Gemma 4 hands out its states since vllm-project/vllm#39450"

# Class -> the oldest vLLM. Each has `SupportsEagle3` in 0.32: tests/vllm/test_rules.py asks it.
EAGLE3: dict[str, str] = {
    "LlamaForCausalLM": _PARALLEL,
    "Qwen2ForCausalLM": _PARALLEL,
    "Qwen3ForCausalLM": _PARALLEL,
    "Qwen3MoeForCausalLM": _PARALLEL,
    "GptOssForCausalLM": _GROUPED,
    "Gemma4ForCausalLM": _GEMMA4,
    "Gemma4ForConditionalGeneration": _GEMMA4,
}


@dataclass(frozen=True)
class Served:
    """One thing that vLLM needs, whether the pair has it, and in which words."""

    name: str
    good: bool
    text: str


def served(recipe: Recipe, facts: TargetFacts, head: HeadConfig) -> list[Served]:
    """What vLLM needs of the pair, one finding each."""
    return [
        _supported(facts),
        _groups(facts, head),
        _rope(head, facts),
        _mask(recipe, facts),
        Served(
            "context",
            head.max_position_embeddings >= facts.max_position_embeddings,
            f"{head.max_position_embeddings:,} positions, the target has {facts.max_position_embeddings:,}",
        ),
        Served(
            "positions",
            recipe.evaluate.k <= recipe.train.positions,
            f"trained for {recipe.train.positions}, so num_speculative_tokens up to that; measured at "
            f"{recipe.evaluate.k}",
        ),
    ]


def _supported(facts: TargetFacts) -> Served:
    found = EAGLE3.get(facts.class_name)
    if found is None:
        text = f"vLLM {RUN_WITH} is not known to hand out aux states of {facts.class_name}"
        return Served("EAGLE-3 support", False, text)
    return Served("EAGLE-3 support", True, f"{facts.class_name}: {found}; proven with {RUN_WITH}")


def _groups(facts: TargetFacts, head: HeadConfig) -> Served:
    layers = kv_layers(head)
    try:
        flags = serving_flags(head, facts.kv_layers)
    except ValueError as error:
        return Served("KV cache groups", False, str(error))
    groups = groups_of_head(facts.kv_layers, layers)
    if not flags:
        return Served("KV cache groups", True, f"the head's {len(layers)} layers share one")
    text = (
        f"the head's {len(layers)} layers fall into {groups}: served with {' '.join(flags)}, which costs "
        "the memory that sliding layers would save; fewer head layers may do without"
    )
    return Served("KV cache groups", True, text)


def _rope(head: HeadConfig, facts: TargetFacts) -> Served:
    rope = head.rope
    scaling = {"rope_type": rope.rope_type, **rope.scaling}
    theirs = facts.rope_scaling or {"rope_type": "default"}
    same = rope.theta == facts.rope_theta and scaling == theirs
    whose = "as the target's" if same else f"the target's: {theirs['rope_type']}, theta {facts.rope_theta:,g}"
    return Served("RoPE", True, f"{rope.rope_type}, theta {rope.theta:,g}; {whose}")


def _mask(recipe: Recipe, facts: TargetFacts) -> Served:
    token = recipe.head.mask_token
    if token is None:
        return Served("mask token", True, "none: method eagle3")
    if token == "unused":
        text = f"`unused`: the first of {facts.vocab_size:,} rows without a token, found when prepare starts"
    else:
        text = f"{token!r}: held against tokenizer, template and data when prepare starts"
    return Served("mask token", True, text)
