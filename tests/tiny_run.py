"""A recipe that runs in seconds: sums to answer, a tiny Llama to answer them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import yaml

from peagle_train.twin.models import tiny_llama


def tiny_recipe(folder: Path, name: str, *, heldout: int, train: dict[str, Any], **sections: Any) -> Path:
    """Writes target, prompts and recipe into `folder`.

    Args:
        folder: where they go, and the run.
        name: of the recipe.
        heldout: how many questions to report on; 8 train, 4 choose.
        train: keys of that section, over those that are set here.
        sections: others of the recipe.
    """
    tiny_llama(folder / "target")
    for part, first, count in (("train", 0, 8), ("validation", 20, 4), ("heldout", 40, heldout)):
        lines = [json.dumps({"prompt": f"What is {n} plus {n}?"}) for n in range(first, first + count)]
        (folder / f"{part}.jsonl").write_text("\n".join(lines) + "\n")
    values = {
        "name": name,
        "output": str(folder / "runs"),
        "target": {"model": str(folder / "target"), "dtype": "float32", "device": "cpu"},
        "data": {
            "train": {"source": str(folder / "train.jsonl")},
            "validation": {"source": str(folder / "validation.jsonl")},
            "heldout": {"sums": {"source": str(folder / "heldout.jsonl")}},
            "max_new_tokens": 20,
            "batch_size": 8,
            "workers": 1,
        },
        "states": {"dtype": "float32"},
        "head": {"layers": 1, "aux_layers": [1, 2, 3], "mask_token": "unused", "draft_vocab_size": 64},
        "train": {"steps": 12, "accumulate": 2, "learning_rate": 2e-3, "precision": "fp32", **train},
        **sections,
    }
    path = folder / f"{name}.yaml"
    path.write_text(yaml.safe_dump(values))
    return path
