"""What both sides are given. Only torch is imported here: two environments read this file."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Shape:
    """Sizes of the head and of its training elements.

    aux_states: target layers that are tapped. positions: K. rate: r of COD, without a floor. prompt_share:
    part of the document that is prompt. train_embeddings, train_output: whether the embedding table and the
    output rows are trained (all else always is).
    """

    hidden_size: int = 576
    intermediate_size: int = 1536
    num_layers: int = 4
    num_attention_heads: int = 9
    num_key_value_heads: int = 3
    head_dim: int = 64
    vocab_size: int = 49_152
    draft_vocab_size: int = 8_192
    aux_states: int = 3
    positions: int = 8
    rate: float = 0.8
    prompt_share: float = 0.25
    mask_token_id: int = 3
    rms_norm_eps: float = 1e-5
    rope_theta: float = 10_000.0
    train_embeddings: bool = True
    train_output: bool = True

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)

    def draft_token_ids(self) -> Tensor:
        """[DV] int64, rising target ids of the draft vocabulary; the mask token is not among them."""
        order = torch.randperm(self.vocab_size, generator=torch.Generator().manual_seed(1))
        return order[order != self.mask_token_id][: self.draft_vocab_size].sort().values


@dataclass(frozen=True)
class Case:
    """One document of S tokens: a prompt and one answer."""

    token_ids: Tensor  # [S] int64
    loss_mask: Tensor  # [S] bool, true where generated
    aux: Tensor  # [S, A*H] float32
    last: Tensor  # [S, H] float32, before the target's final norm


def make_case(shape: Shape, tokens: int) -> Case:
    """The document of `tokens` tokens: the same numbers in every process with the same torch."""
    generator = torch.Generator().manual_seed(tokens)
    ids = torch.randint(0, shape.vocab_size - 1, (tokens,), generator=generator)
    return Case(
        token_ids=ids + (ids >= shape.mask_token_id),  # the mask token is in no text
        loss_mask=torch.arange(tokens) >= round(tokens * shape.prompt_share),
        aux=torch.randn(tokens, shape.aux_states * shape.hidden_size, generator=generator),
        last=torch.randn(tokens, shape.hidden_size, generator=generator),
    )


@dataclass(frozen=True)
class Outcome:
    """What one step did. loss: mean over its elements. rows: of the network. elements: rows with loss."""

    loss: float
    rows: int
    elements: int
