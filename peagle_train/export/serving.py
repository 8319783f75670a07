"""How a head is served: what vLLM must be told beyond the head's own directory."""

from __future__ import annotations

from peagle_train.head.config import HeadConfig
from peagle_train.target.facts import KVLayer, TargetFacts
from peagle_train.target.kv_groups import FLAG, needs_flag


def kv_layers(head: HeadConfig) -> tuple[KVLayer, ...]:
    """What each layer of a head keeps in a KV cache, as `TargetFacts` says it of its target's layers."""
    return tuple(KVLayer(window, head.num_key_value_heads, head.head_dim) for window in head.windows)


def serving_flags(head: HeadConfig, target: TargetFacts) -> list[str]:
    """Flags of `vllm serve` that this pair needs.

    Raises:
        ValueError: vLLM cannot serve the pair at all.
    """
    return [FLAG] if needs_flag(kv_layers(head), target) else []
