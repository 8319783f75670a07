"""Runs under vLLM's interpreter: what vLLM itself computes for RoPE tables and KV cache groups, as JSON.

    python vllm_rules.py results.json < questions.json

{"ropes": [{"config": DIR, "positions": [...]}],
 "groups": [{"target": [[window, kv_heads, head_dim], ...], "head": [...], "one": bool}]}

A RoPE is asked for as the drafter asks: config.json is read by vLLM's own loader, then `get_rope`. Groups are
asked of `get_kv_cache_groups`, with layers of the target before those of the head.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor.layers.rotary_embedding import get_rope
from vllm.transformers_utils.config import get_config
from vllm.v1.core.kv_cache_utils import get_kv_cache_groups
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

BLOCK = 16


def tables(question):
    """cos and sin of the asked positions, each [P, D/2]."""
    config = get_config(question["config"], trust_remote_code=False)
    with set_current_vllm_config(VllmConfig()):
        rope = get_rope(
            config.head_dim,
            max_position=config.max_position_embeddings,
            rope_parameters=config.rope_parameters,
            dtype=torch.float32,
        )
    rows = rope.cos_sin_cache[torch.tensor(question["positions"])].double()
    return [half.tolist() for half in rows.chunk(2, -1)]


def spec(layer):
    window, kv_heads, head_dim = layer
    shape = {"block_size": BLOCK, "num_kv_heads": kv_heads, "head_size": head_dim, "dtype": torch.bfloat16}
    return FullAttentionSpec(**shape) if window is None else SlidingWindowSpec(**shape, sliding_window=window)


def groups(question):
    """Over how many groups the head's layers are spread; 0 where vLLM does not start."""
    config = SimpleNamespace(
        scheduler_config=SimpleNamespace(disable_hybrid_kv_cache_manager=question["one"]),
        cache_config=SimpleNamespace(
            get_resolved_kv_cache_layout=lambda: SimpleNamespace(is_block_outermost=False)
        ),
        speculative_config=None,
        model_config=None,
        attention_config=SimpleNamespace(hisparse_config=None),
    )
    layers = {f"target.{i}": spec(layer) for i, layer in enumerate(question["target"])}
    layers |= {f"head.{i}": spec(layer) for i, layer in enumerate(question["head"])}
    try:
        found = get_kv_cache_groups(config, layers)
    except ValueError:
        return 0
    return sum(any(name.startswith("head.") for name in group.layer_names) for group in found)


def main():
    questions = json.load(sys.stdin)
    answers = {
        "ropes": [tables(question) for question in questions["ropes"]],
        "groups": [groups(question) for question in questions["groups"]],
    }
    Path(sys.argv[1]).write_text(json.dumps(answers))


if __name__ == "__main__":
    main()
