"""The sizes of a drafter head."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class HeadConfig:
    """Everything that fixes a head's shape and arithmetic.

    `vocab_size` is the target's; `draft_vocab_size` is how many of its tokens the head can draft
    (equal: all, and no map exists). `aux_layers` follow vLLM: id i is the output of the first i
    decoder layers of the target.
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
    mask_token_id: int
    rms_norm_eps: float
    rope_theta: float
    max_position_embeddings: int
    own_embeddings: bool

    @property
    def aux_width(self) -> int:
        """Width of the concatenated aux states that enter `fc`."""
        return len(self.aux_layers) * self.target_hidden_size

    @property
    def reduced_vocabulary(self) -> bool:
        """Whether a map from draft to target ids exists."""
        return self.draft_vocab_size != self.vocab_size

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> HeadConfig:
        """The inverse of `to_dict`; a missing or unknown key raises TypeError."""
        return cls(**{**values, "aux_layers": tuple(values["aux_layers"])})
