"""The twin that stands in for a recipe's target.

Class, tokenizer, chat format, RoPE kind and order of layer kinds are the target's; sizes are small. It has as
many layers as vLLM needs to give the head's layers one KV cache group beside them (target/kv_groups.py): the
real targets fit, so their twins shall.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from peagle_train.errors import PeagleError
from peagle_train.files import atomic_directory, read_json, write_json
from peagle_train.recipe.schema import Recipe, TargetSection
from peagle_train.target.facts import KVLayer, TargetFacts

HIDDEN = 128  # vLLM's attention on a CPU wants heads of at least 32
POSITIONS = 4096
WINDOW = 8
_FEWEST_LAYERS = 8  # vLLM's rule for aux layers, 2, L // 2, L - 3, repeats layers below that
_MOST_LAYERS = 48
_MANIFEST = "peagle_twin.json"
_VERSION = 2

# Class -> twin. A Llama of version 3 is told by its RoPE.
_KINDS = {
    "LlamaForCausalLM": "llama",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Qwen3MoeForCausalLM": "qwen3_moe",
    "GptOssForCausalLM": "gpt_oss",
    "Gemma4ForCausalLM": "gemma4",
    "Gemma4ForConditionalGeneration": "gemma4_multimodal",
}
# Every so many layers one is full, the last of them; the others slide. Kinds that are not here are all full.
_PERIODS = {"gpt_oss": 2, "gemma4": 6, "gemma4_multimodal": 6}
_ROWS = {"llama": 256, "gemma4": 448, "gemma4_multimodal": 448}


@dataclass(frozen=True)
class Original:
    """What a twin must know of the target it stands for; `rope_type` as transformers names it."""

    class_name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    rope_type: str = "default"


# Known without a network, from the models' config.json.
_KNOWN = {
    "openai/gpt-oss-20b": Original("GptOssForCausalLM", 24, 2880, 201_088, "yarn"),
    "openai/gpt-oss-120b": Original("GptOssForCausalLM", 36, 2880, 201_088, "yarn"),
    "Qwen/Qwen3-Coder-30B-A3B-Instruct": Original("Qwen3MoeForCausalLM", 48, 2048, 151_936),
    "google/gemma-4-31B-it": Original("Gemma4ForConditionalGeneration", 60, 5376, 262_144, "proportional"),
}


@dataclass(frozen=True)
class Twin:
    """A twin to be made. kind: a key of models.CONFIGS."""

    kind: str
    layers: int
    hidden: int = HIDDEN
    positions: int = POSITIONS
    seed: int = 0

    @property
    def rows(self) -> int:
        """Rows of its embedding table."""
        return _ROWS.get(self.kind, 320)

    @property
    def shape(self) -> Any:
        """Its tokenizer's: template, mask token and the rest (tokenizers.SHAPES)."""
        from peagle_train.twin.models import TOKENIZERS
        from peagle_train.twin.tokenizers import SHAPES

        return SHAPES[TOKENIZERS[self.kind]]

    @property
    def facts(self) -> TargetFacts:
        """Its sizes, as the rest of the program reads them; no weight is made."""
        from peagle_train.target.facts import read_facts
        from peagle_train.twin.models import config_of

        config = config_of(self.kind, self.layers, self.hidden, self.rows, **self._changes())
        return read_facts(config, f"twin of {config.architectures[0]}")

    def write(self, folder: Path) -> bool:
        """Makes the model in `folder`, unless the same one is there; says whether it had to."""
        from peagle_train.twin.models import tiny

        made_from = {
            **asdict(self),
            "version": _VERSION,
            "transformers": importlib.metadata.version("transformers"),
        }
        if (folder / _MANIFEST).is_file() and read_json(folder / _MANIFEST) == made_from:
            return False
        with atomic_directory(folder) as temporary:
            tiny(
                self.kind,
                temporary,
                layers=self.layers,
                hidden=self.hidden,
                vocab=self.rows,
                seed=self.seed,
                reticent=True,
                **self._changes(),
            )
            write_json(temporary / _MANIFEST, made_from)
        return True

    def _changes(self) -> dict[str, Any]:
        changes: dict[str, Any] = {"max_position_embeddings": self.positions}
        period = _PERIODS.get(self.kind)
        if period is not None:
            changes["sliding_window"] = WINDOW
            changes["layer_types"] = [
                "full_attention" if layer % period == period - 1 else "sliding_attention"
                for layer in range(self.layers)
            ]
        return changes


def original_of(section: TargetSection) -> Original:
    """The target of a recipe, from what is known here or else from its config.

    Raises PeagleError where neither can be had.
    """
    if section.model in _KNOWN:
        return _KNOWN[section.model]
    from peagle_train.target.source import describe

    facts = describe(section)
    rope_type = (facts.rope_scaling or {}).get("rope_type", "default")
    return Original(facts.class_name, facts.num_layers, facts.hidden_size, facts.vocab_size, rope_type)


def twin_of(recipe: Recipe, original: Original, head_windows: Sequence[int | None]) -> Twin:
    """The twin for a recipe whose head, as it is rehearsed, has layers with these windows (None: full).

    Raises PeagleError for a class without a twin.
    """
    from peagle_train.target.kv_groups import groups_of_head

    kind = _KINDS.get(original.class_name)
    if kind is None:
        raise PeagleError(
            f"target {recipe.target.model}: {original.class_name} has no twin; expected one of "
            f"{', '.join(_KINDS)}; add one to peagle_train/twin/models.py"
        )
    if kind == "llama" and original.rope_type == "llama3":
        kind = "llama3"
    period = _PERIODS.get(kind, 1)
    first = -(-_FEWEST_LAYERS // period) * period
    for layers in range(first, _MOST_LAYERS + 1, period):
        twin = Twin(kind, layers)
        facts = twin.facts
        head = [KVLayer(window, facts.num_key_value_heads, facts.head_dim) for window in head_windows]
        if groups_of_head(facts.kv_layers, head) == 1:
            return twin
    return Twin(kind, first)  # served with a flag, as its original would be
