"""A small head, its target's facts, and the directory it was exported to."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle_train.export.layout import export_head
from peagle_train.head.config import HeadConfig
from peagle_train.head.model import DrafterHead
from peagle_train.head.rope import Rope
from peagle_train.target.facts import KVLayer, TargetFacts

FACTS = TargetFacts(
    model="owner/target",
    class_name="LlamaForCausalLM",
    num_layers=4,
    hidden_size=32,
    intermediate_size=64,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    vocab_size=96,
    max_position_embeddings=512,
    rope_theta=30000.0,
    rope_scaling=None,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    logit_softcap=None,
    kv_layers=(KVLayer(None, 2, 8),) * 4,
)


def small_head(
    *, own: bool = True, draft_vocab_size: int = 40, layers: int = 2, **changes: Any
) -> DrafterHead:
    """A random head for FACTS; every tensor non-zero."""
    fields: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "vocab_size": 96,
        "draft_vocab_size": draft_vocab_size,
        "target_hidden_size": 32,
        "aux_layers": (1, 2, 4),
        "mask_token_id": 3,
        "rms_norm_eps": 1e-5,
        "rope": Rope(30000.0),
        "max_position_embeddings": 512,
        "own_embeddings": own,
    }
    with torch.random.fork_rng():
        torch.manual_seed(0)
        head = DrafterHead(HeadConfig(**{**fields, **changes}))
        with torch.no_grad():
            for parameter in head.parameters():
                parameter.normal_()
        if head.config.reduced_vocabulary:
            others = torch.randperm(96)
            head.set_draft_tokens(others[others != 3][:draft_vocab_size].sort().values)
    return head


@pytest.fixture
def exported(tmp_path: Path) -> Callable[..., Path]:
    """Exports a small head and returns its directory."""

    def export(*, format: str = "plain", dtype: str = "float32", **shape: Any) -> Path:
        directory = tmp_path / "head"
        export_head(small_head(**shape), directory, target=FACTS, dtype=dtype, format=format)
        return directory

    return export
