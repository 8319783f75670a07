"""How a head is served: what vLLM must be told beyond the head's own directory."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from peagle_train.head.config import HeadConfig, Method
from peagle_train.target.facts import KVLayer
from peagle_train.target.kv_groups import FLAG, needs_flag


def kv_layers(head: HeadConfig) -> tuple[KVLayer, ...]:
    """What each layer of a head keeps in a KV cache, as `TargetFacts` says it of its target's layers."""
    return tuple(KVLayer(window, head.num_key_value_heads, head.head_dim) for window in head.windows)


def serving_flags(head: HeadConfig, target: Sequence[KVLayer]) -> tuple[str, ...]:
    """Flags of `vllm serve` that a head needs beside a target with these layers.

    Raises:
        ValueError: vLLM cannot serve the pair at all.
    """
    return (FLAG,) if needs_flag(kv_layers(head), target) else ()


def serve_command(
    head_dir: Path | str,
    target: str,
    k: int,
    format: str = "plain",
    *,
    method: Method = "peagle",
    flags: Sequence[str] = (),
) -> str:
    """The command that serves a head.

    vLLM's method and parallel drafting are always named for a plain head: left out, vLLM guesses the method
    from the folder's name and drafts one token at a time. vLLM calls both of our methods eagle3; parallel
    drafting is what tells them apart. A speculators head says all of it itself.
    """
    if format == "speculators":
        return shlex.join(["vllm", "serve", str(head_dir), *flags])
    speculative = {
        "method": "eagle3",
        "model": str(head_dir),
        "num_speculative_tokens": k,
        "parallel_drafting": method == "peagle",
    }
    return shlex.join(["vllm", "serve", target, "--speculative-config", json.dumps(speculative), *flags])
