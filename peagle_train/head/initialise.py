"""First weights of a head.

From the target (default): `fc` passes the deepest aux state through; the layers are the target's last
ones; the embedding half of layer 0 starts at zero, so the head begins as the target's own continuation
and learns what the next token's embedding adds; `mask_hidden` is the mean state; norm and `lm_head` are
the target's. At random: everything but the embedding table, which the paper copies in any case.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from peagle_train.head.model import DrafterHead

_WIDE = ("self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.v_proj.weight")
"""Layer 0's matrices that read [embedding; state], 2H."""


COPIED = frozenset(
    [
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        *(f"self_attn.{part}_proj.{kind}" for part in "qkvo" for kind in ("weight", "bias")),
        *(f"self_attn.{part}_norm.weight" for part in "qk"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    ]
)
"""Parameters of a target's decoder layer that a head's layer may have too, by their names in both."""


@torch.no_grad()
def initialise_randomly(head: DrafterHead, embeddings: Tensor, seed: int, std: float = 0.02) -> None:
    """Normal weights of the given deviation, norms at one, biases at zero, the target's embeddings [V, TH].

    A head of another width than its target starts with random embeddings too.
    """
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in head.named_parameters():
        if name.endswith(".bias"):
            parameter.zero_()
        elif parameter.ndim == 1:  # a norm
            parameter.fill_(1.0)
        else:
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * std)
    if head.embed_tokens.weight.shape == embeddings.shape:
        head.embed_tokens.weight.copy_(embeddings)


@torch.no_grad()
def initialise_from_target(
    head: DrafterHead,
    *,
    embeddings: Tensor,
    output_rows: Tensor,
    final_norm: Tensor,
    layers: Sequence[Mapping[str, Tensor]],
    mean_aux: Tensor,
    seed: int,
) -> list[str]:
    """Copies from the target what has the head's shapes.

    Args:
        embeddings: [V, H] the target's table, unscaled.
        output_rows: [DV, H] the target's output rows for the draft vocabulary, in its order.
        final_norm: [H] weight of the target's final norm.
        layers: parameters of the target's last `num_layers` decoder layers, in order.
        mean_aux: [A*TH] mean of the concatenated aux states over the training rows.
        seed: for what cannot be copied.

    Returns:
        Names of the head's matrices that could not be taken from the target and are random.
    """
    initialise_randomly(head, embeddings, seed)
    left: list[str] = []
    config = head.config
    if head.embed_tokens.weight.shape != embeddings.shape:
        left.append("embed_tokens.weight")
    if config.target_hidden_size == config.hidden_size:
        head.fc.weight.zero_()
        head.fc.weight[:, -config.hidden_size :].copy_(torch.eye(config.hidden_size))
    else:
        left.append("fc.weight")
    if head.mask_hidden is not None:
        head.mask_hidden.copy_(mean_aux.view_as(head.mask_hidden))
    _copy(head.lm_head.weight, output_rows, "lm_head.weight", left)
    _copy(head.norm.weight, final_norm, "norm.weight", left)
    for index, (mine, theirs) in enumerate(zip(head.blocks, layers, strict=True)):
        for name, parameter in mine.named_parameters():
            if name in ("input_layernorm.weight", "hidden_norm.weight") and index == 0:
                continue
            full = f"layers.{index}.{name}"
            if index == 0 and name in _WIDE:
                # The wide layer: embeddings first, states second.
                parameter[:, : config.hidden_size].zero_()
                _copy(parameter[:, config.hidden_size :], theirs.get(name), full, left)
            else:
                _copy(parameter, theirs.get(name), full, left)
        if index == 0:
            _copy(
                mine.hidden_norm.weight,
                theirs.get("input_layernorm.weight"),
                "layers.0.hidden_norm.weight",
                left,
            )
    return left


def _copy(into: Tensor, source: Tensor | None, name: str, left: list[str]) -> None:
    if source is not None and source.shape == into.shape:
        into.copy_(source)
    elif into.ndim > 1:  # norms and biases without a source are neutral, not random
        left.append(name)
