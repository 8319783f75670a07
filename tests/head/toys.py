"""Small heads and rows for the head's tests."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from peagle_train.head.alignment import trainable_depths
from peagle_train.head.batch import Document
from peagle_train.head.config import FULL, SLIDING, HeadConfig
from peagle_train.head.model import DrafterHead
from peagle_train.head.rope import Rope
from peagle_train.head.sampling import sample_depths

CONFIG = HeadConfig(
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=4,
    vocab_size=40,
    draft_vocab_size=25,
    target_hidden_size=12,
    aux_layers=(1, 2, 4),
    mask_token_id=3,
    rms_norm_eps=1e-5,
    rope=Rope(10_000.0),
    max_position_embeddings=64,
    own_embeddings=True,
)

EAGLE3: dict[str, Any] = dict(method="eagle3", mask_token_id=None)
"""The method as a change of CONFIG; it goes with every layout below."""

YARN = Rope(10_000.0, "yarn", factor=4.0, original_max_position_embeddings=16, beta_fast=4.0, truncate=False)
LLAMA3 = Rope(
    10_000.0,
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=32,
)
LAYOUTS: dict[str, dict[str, Any]] = {
    "full vocabulary": dict(draft_vocab_size=40),
    "shared embeddings": dict(own_embeddings=False),
    "one aux layer": dict(aux_layers=(2,)),
    "two aux layers": dict(aux_layers=(0, 5)),
    "five aux layers": dict(aux_layers=(0, 1, 2, 3, 5)),
    "qwen3": dict(drafter="qwen3"),
    "qwen3 with biases": dict(drafter="qwen3", attention_bias=True),
    "biases": dict(attention_bias=True),
    "norm before residual": dict(norm_before_residual=True),
    "norm before fc": dict(norm_before_fc=True),
    "fc norm": dict(fc_norm=True),
    "both norms": dict(norm_before_fc=True, fc_norm=True),
    "narrower": dict(hidden_size=10),
    "linear rope": dict(rope=Rope(10_000.0, "linear", factor=2.0)),
    "llama3 rope": dict(rope=LLAMA3),
    "yarn rope": dict(rope=YARN),
    "sliding": dict(layer_types=(SLIDING, SLIDING), sliding_window=3),
    "mixed windows": dict(num_layers=3, layer_types=(FULL, SLIDING, FULL), sliding_window=5),
    "window of one": dict(layer_types=(SLIDING, FULL), sliding_window=1),
    "all at once": dict(
        drafter="qwen3",
        attention_bias=True,
        norm_before_residual=True,
        norm_before_fc=True,
        fc_norm=True,
        hidden_size=10,
        rope=YARN,
        layer_types=(FULL, SLIDING),
        sliding_window=4,
    ),
}
"""Every option of a head, as changes of CONFIG."""


def toy_head(seed: int = 0, dtype: torch.dtype = torch.float64, **changes: Any) -> DrafterHead:
    """A random head with lively weights; norms are not one, so a dropped norm shows."""
    config = replace(CONFIG, **changes)
    head = DrafterHead(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in head.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            norm = p.ndim == 1 and not name.endswith(".bias")
            p.copy_(1 + 0.3 * noise if norm else 0.5 * noise)
    if config.reduced_vocabulary:
        ids = torch.randperm(config.vocab_size, generator=generator)
        ids = ids[ids != CONFIG.mask_token_id][: config.draft_vocab_size].sort().values
        head.set_draft_tokens(ids)
    return head.to(dtype)


def toy_document(
    seed: int,
    *,
    length: int = 14,
    turns: tuple[tuple[int, int], ...] = ((5, 14),),
    positions: int = 4,
    rate: float = 0.8,
    config: HeadConfig = CONFIG,
    dtype: torch.dtype = torch.float64,
) -> Document:
    """A row of random tokens whose spans `turns` were generated, with one COD draw."""
    generator = torch.Generator().manual_seed(seed)
    mask = torch.zeros(length, dtype=torch.bool)
    for start, end in turns:
        mask[start:end] = True
    token_ids = torch.randint(4, config.vocab_size, (length,), generator=generator)
    aux = torch.randn(length - 1, config.aux_width, generator=generator, dtype=dtype)
    last = torch.randn(length - 1, config.target_hidden_size, generator=generator, dtype=dtype)
    kept = sample_depths(trainable_depths(mask), positions, rate, generator=generator)
    return Document(token_ids, aux, last, kept)
