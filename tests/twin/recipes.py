"""Recipes in the shape of those of the four targets, as users write them; nothing they name is at hand."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

MODELS = {
    "gpt_oss": "openai/gpt-oss-20b",
    "qwen3_moe": "Qwen/Qwen3-Coder-30B-A3B-Instruct",
    "gemma4": "google/gemma-4-31B-it",
}
_AUX = {"gpt_oss": [2, 12, 21], "qwen3_moe": [2, 24, 45], "gemma4": [2, 30, 57]}
_OWN: dict[str, dict[str, Any]] = {
    "gpt_oss": {
        "data.date": "2025-06-28",
        "data.turns": "each",
        "data.template_variables": {"reasoning_effort": "low"},
        "data.sampling": [
            {"weight": 2},
            {"weight": 1, "temperature": 1.0, "template_variables": {"reasoning_effort": "high"}},
        ],
    },
    "qwen3_moe": {"head.draft_vocab_size": 32768, "head.drafter": "qwen3"},
    "gemma4": {
        "data.template_variables": {"enable_thinking": True},
        "head.mask_token": "<unused0>",
        "head.rope": {"rope_type": "default", "rope_theta": 1e6},
        "head.embeddings": "shared",
        "head.num_key_value_heads": 4,
        "head.head_dim": 512,
        "target.revision": "0123abc",
        "method": "peagle",
    },
}


def write_recipe(folder: Path, family: str, **changes: Any) -> Path:
    """Writes the recipe of a family into `folder`. changes: by dotted key, over it."""
    values: dict[str, Any] = {
        "name": family.replace("_", "-"),
        "output": str(folder / "runs"),
        "target": {"model": MODELS[family]},
        "data": {
            "train": {
                "mix": [
                    {"source": "ultrachat", "weight": 2},
                    {"source": "hub:nvidia/OpenCodeInstruct", "columns": {"prompt": "input"}},
                ],
                "split": "train",
                "count": 100_000,
            },
            "validation": {"source": "ultrachat", "split": "validation", "count": 500},
            "heldout": {"chat": {"source": "ultrachat", "split": "heldout", "count": 200}},
            "system_prompt": "Be brief.",
            "server": {"url": "http://localhost:8000/v1"},
            "decontaminate": ["humaneval", "mt-bench"],
            "max_prompt_tokens": 2048,
            "max_new_tokens": 6144,
        },
        "states": {"url": "s3://bucket/states", "backend": "vllm", "keep_while_answering": False},
        "head": {"layers": 4, "aux_layers": _AUX[family], "mask_token": "unused"},
        "train": {
            "positions": 8,
            "steps": 20_000,
            "warmup_steps": 50,
            "backend": "flash",
            "memory": 70.0,
            "launch": "recipes/accelerate/eight_gpus.yaml",
        },
        "track": {"log_with": ["wandb"], "entity": "team"},
        "evaluate": {"k": 5},
        "push": {"to": "hf://owner/head"},
    }
    for key, value in {**_OWN[family], **changes}.items():
        *above, last = key.split(".")
        section = values
        for part in above:
            section = section.setdefault(part, {})
        section[last] = value
    path = folder / f"{family}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
