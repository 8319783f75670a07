"""RoPE tables: against transformers' own, and what a cast of the head must not touch. vLLM: tests/vllm."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from peagle_train.head.rope import KINDS, Rope
from tests.head.toys import toy_head

HEAD_DIM = 64
POSITIONS = torch.tensor([0, 1, 5_000, 100_000])
SCALINGS: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 4.0},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    },
    "yarn": {"factor": 32.0, "original_max_position_embeddings": 4096},
    "yarn, as gpt-oss has it": {
        "rope_type": "yarn",
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    },
    "yarn, with its attention factor named": {
        "rope_type": "yarn",
        "factor": 16.0,
        "original_max_position_embeddings": 8192,
        "attention_factor": 0.9,
    },
    "yarn, with two mscales": {
        "rope_type": "yarn",
        "factor": 40.0,
        "original_max_position_embeddings": 4096,
        "mscale": 1.0,
        "mscale_all_dim": 0.8,
    },
}


@pytest.mark.parametrize("theta", [10_000.0, 150_000.0, 1e7])
@pytest.mark.parametrize("name", SCALINGS)
def test_tables_equal_transformers(name: str, theta: float) -> None:
    """An implementation of other people; at 100k a wrong frequency is whole turns off."""
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    parameters = {"rope_type": name, **SCALINGS[name]}
    config = LlamaConfig(
        hidden_size=2 * HEAD_DIM,
        num_attention_heads=2,
        head_dim=HEAD_DIM,
        max_position_embeddings=131_072,
        rope_parameters={**parameters, "rope_theta": theta},
    )
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1, dtype=torch.float32), POSITIONS[None])
    ours = Rope.from_parameters(theta, parameters).angles(POSITIONS, HEAD_DIM)
    for mine, theirs in zip(ours, (cos, sin), strict=True):
        assert torch.allclose(mine, theirs[0, :, : HEAD_DIM // 2], atol=2e-2)
        assert torch.allclose(mine[:3], theirs[0, :3, : HEAD_DIM // 2], atol=1e-3)


def test_every_kind_is_compared() -> None:
    assert {s.get("rope_type", name) for name, s in SCALINGS.items()} == set(KINDS)


def test_tables_survive_a_cast_of_the_head() -> None:
    """In bfloat16 the frequencies stay float32: at position 100,000 rounded ones would be nonsense."""
    exact = toy_head(dtype=torch.float64).turns(POSITIONS, torch.float64)
    cast = toy_head(dtype=torch.bfloat16).turns(POSITIONS, torch.float32)
    for ours, reference in zip(cast, exact, strict=True):
        assert torch.allclose(ours.double(), reference, atol=1e-2)


def test_yarn_reaches_as_far_as_the_server_has_a_table() -> None:
    assert Rope(1e4).reach == math.inf
    assert Rope(1e4, "yarn", factor=32.0, original_max_position_embeddings=4096).reach == 131_072


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ({"rope_type": "dynamic", "factor": 2.0}, "'dynamic'; expected one of default, linear, llama3, yarn"),
        ({"rope_type": "linear"}, "linear has no factor"),
        ({"rope_type": "yarn", "factor": 4.0}, "yarn has no original_max_position_embeddings"),
        ({"factor": 4.0}, "default does not know factor; expected none"),
        ({"rope_type": "linear", "factor": 2.0, "beta_fast": 1.0}, "linear does not know beta_fast"),
        ({"rope_type": "linear", "factor": 0.5}, "factor is 0.5; expected at least 1"),
        ({"rope_type": "linear", "factor": float("nan")}, "factor is nan; expected a positive number"),
        (
            {
                "rope_type": "yarn",
                "factor": 2.0,
                "original_max_position_embeddings": 64,
                "mscale": 1.0,
            },
            "mscale and mscale_all_dim belong together",
        ),
        ({"rope_type": "default", "partial_rotary_factor": 0.25}, "with partial_rotary_factor is not known"),
    ],
)
def test_what_it_cannot_be_is_refused(parameters: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Rope.from_parameters(1e4, parameters)
