"""The sizes of a drafter head, and the options of its arithmetic."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Literal

from peagle_train.head.rope import Rope

Method = Literal["peagle", "eagle3"]
Drafter = Literal["llama", "qwen3"]

FULL, SLIDING = "full_attention", "sliding_attention"
"""The kinds of attention layer, as transformers and vLLM spell them in `layer_types`."""


@dataclass(frozen=True)
class HeadConfig:
    """Everything that fixes a head's shape and arithmetic.

    `vocab_size` is the target's; `draft_vocab_size` is how many of its tokens the head can draft
    (equal: all, and no map exists). `aux_layers` follow vLLM: id i is the output of the first i
    decoder layers of the target.

    Options, each as vLLM's drafters compute it:
        method: peagle drafts K tokens in one pass and needs `mask_token_id`; eagle3 drafts one after the
            other, each fed with the state of the one before, and has no mask token (None).
        drafter: llama, or qwen3 with norms on queries and keys (`q_norm`, `k_norm`).
        norm_before_residual: the residual stream of layer 0 starts from the normed state, not the bare one.
        norm_before_fc: one norm over all tapped states before `fc` (`input_norm`).
        fc_norm: a norm of its own for each tapped state before `fc`; after `input_norm` if there are both.
        norm_output: eagle3 feeds the normed state back, not the bare one. No part of a parallel draft.
        attention_bias: biases on q, k and v, with the llama drafter on the output projection too.
        layer_types: per layer full or sliding attention; empty: all full.
        sliding_window: how many positions, its own included, a row of a sliding layer sees.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    vocab_size: int
    draft_vocab_size: int
    target_hidden_size: int
    aux_layers: tuple[int, ...]
    mask_token_id: int | None
    rms_norm_eps: float
    rope: Rope
    max_position_embeddings: int
    own_embeddings: bool
    method: Method = "peagle"
    drafter: Drafter = "llama"
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    attention_bias: bool = False
    layer_types: tuple[str, ...] = ()
    sliding_window: int | None = None

    def __post_init__(self) -> None:
        if (self.method == "peagle") != (self.mask_token_id is not None):
            raise ValueError(
                f"a {self.method} head has mask token {self.mask_token_id}; "
                "peagle needs one, eagle3 has no use for it"
            )
        if self.layer_types and len(self.layer_types) != self.num_layers:
            raise ValueError(
                f"layer_types names {len(self.layer_types)} layers, the head has {self.num_layers}"
            )
        if (SLIDING in self.layer_types) != (self.sliding_window is not None):
            raise ValueError(
                f"sliding_window is {self.sliding_window} for layer_types {list(self.layer_types)}; "
                "a window belongs to sliding layers and they need one"
            )

    @property
    def aux_width(self) -> int:
        """Width of the concatenated aux states that enter `fc`."""
        return len(self.aux_layers) * self.target_hidden_size

    @property
    def reduced_vocabulary(self) -> bool:
        """Whether a map from draft to target ids exists."""
        return self.draft_vocab_size != self.vocab_size

    @property
    def windows(self) -> tuple[int | None, ...]:
        """The window of each layer; None where a row sees everything before it."""
        kinds = self.layer_types or (FULL,) * self.num_layers
        return tuple(self.sliding_window if kind == SLIDING else None for kind in kinds)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HeadConfig:
        """The inverse of `to_dict`; a missing or unknown key raises TypeError."""
        given = dict(values)
        for key in ("aux_layers", "layer_types"):
            if key in given:
                given[key] = tuple(given[key])
        return cls(**{**given, "rope": Rope(**given["rope"])})
