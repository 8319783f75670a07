"""The whole computation once more, slow and obvious, in float64.

One document at a time, one element at a time, in plain loops: inputs, positions, who sees whom, labels
and loss are each written the way a person would explain them. Nothing is shared with the fast path but
the weights and `alignment`'s three numbers. Tests demand that the fast path returns the same loss and the
same gradients for any draw, any packing and any number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from peagle_train.head.alignment import EMBEDDED, PREDICTED, TARGET_OUTPUT
from peagle_train.head.batch import Document
from peagle_train.head.model import PEagleHead


def reference_loss(
    head: PEagleHead,
    documents: Sequence[Document],
    output_weight: Tensor,
    output_norm: Tensor,
    kind: str = "kl",
) -> tuple[Tensor, int]:
    """Sum of the loss over all kept elements, and how many they are.

    Args:
        head: in float64; gradients reach its parameters.
        documents: rows with their kept chains.
        output_weight: [V, TH] the target's output matrix.
        output_norm: [TH] weight of the target's final norm (plain RMSNorm with the head's eps).
        kind: "kl" or "ce".
    """
    loss = torch.zeros((), dtype=torch.float64)
    count = 0
    draft_ids = head.draft_token_ids.tolist()
    for document in documents:
        elements = [(a, d) for a in range(len(document.kept)) for d in range(int(document.kept[a]))]
        if not elements:
            continue
        last_anchor = max(a for a, _ in elements)
        context = [(a, 0) for a in range(last_anchor + 1)]
        rows = context + [e for e in elements if e[1] > 0]
        outputs = dict(zip(rows, _forward(head, document, rows), strict=True))
        for a, d in elements:
            label = int(document.token_ids[a + d + PREDICTED])
            log_draft = (head.lm_head.weight @ outputs[a, d]).log_softmax(-1)
            if kind == "ce":
                if label in draft_ids:
                    loss = loss - log_draft[draft_ids.index(label)]
                    count += 1
                continue
            state = document.last[a + d + TARGET_OUTPUT].double()
            state = state * (state.square().mean() + head.config.rms_norm_eps).rsqrt() * output_norm
            target = (output_weight[draft_ids] @ state).softmax(-1).detach()
            loss = loss + (target * (target.log() - log_draft)).sum()
            count += 1
    return loss, count


def _sees(query: tuple[int, int], key: tuple[int, int]) -> bool:
    """May element `query` look at element `key` of the same document?"""
    (a, d), (b, e) = query, key
    if e == 0:
        return b <= a  # a real slot at or before the anchor
    return b == a and e <= d  # a mask slot of the own chain, not beyond oneself


def _forward(head: PEagleHead, document: Document, rows: list[tuple[int, int]]) -> list[Tensor]:
    """The final hidden state of every row of one document."""
    config = head.config
    group = config.num_attention_heads // config.num_key_value_heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean() + config.rms_norm_eps).rsqrt() * weight

    def rotate(x: Tensor, position: int) -> Tensor:  # [heads, D]
        half = config.head_dim // 2
        turned, frequencies = [], head.rotary.frequencies().double()
        for i in range(half):
            angle = position * frequencies[i]
            turned.append(
                (
                    x[:, i] * angle.cos() - x[:, i + half] * angle.sin(),
                    x[:, i + half] * angle.cos() + x[:, i] * angle.sin(),
                )
            )
        return torch.stack([t[0] for t in turned] + [t[1] for t in turned], dim=1)

    embeddings, residuals = [], []
    for a, d in rows:
        token = int(document.token_ids[a + EMBEDDED]) if d == 0 else config.mask_token_id
        state = document.aux[a].double() if d == 0 else head.mask_hidden[0, 0]
        embeddings.append(head.embed_tokens.weight[token])
        residuals.append(head.fc.weight @ state)

    for index, layer in enumerate(head.blocks):
        queries, keys, values = [], [], []
        for (a, d), embedding, residual in zip(rows, embeddings, residuals, strict=True):
            if index == 0:
                x = torch.cat(
                    [norm(embedding, layer.input_layernorm.weight), norm(residual, layer.hidden_norm.weight)]
                )
            else:
                x = norm(residual, layer.input_layernorm.weight)
            attention = layer.self_attn
            queries.append(rotate((attention.q_proj.weight @ x).view(-1, config.head_dim), a + d))
            keys.append(rotate((attention.k_proj.weight @ x).view(-1, config.head_dim), a + d))
            values.append((attention.v_proj.weight @ x).view(-1, config.head_dim))
        new_residuals = []
        for i, row in enumerate(rows):
            seen = [j for j in range(len(rows)) if _sees(row, rows[j])]
            mixed = []
            for h in range(config.num_attention_heads):
                scores = torch.stack([queries[i][h] @ keys[j][h // group] for j in seen])
                weights = (scores * config.head_dim**-0.5).softmax(0)
                mixed.append(sum(w * values[j][h // group] for w, j in zip(weights, seen, strict=True)))
            x = residuals[i] + layer.self_attn.o_proj.weight @ torch.cat(mixed)
            y = norm(x, layer.post_attention_layernorm.weight)
            gate = layer.mlp.gate_proj.weight @ y
            x = x + layer.mlp.down_proj.weight @ (gate * gate.sigmoid() * (layer.mlp.up_proj.weight @ y))
            new_residuals.append(x)
        residuals = new_residuals
    return [norm(r, head.norm.weight) for r in residuals]
