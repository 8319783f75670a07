"""The whole computation once more, slow and obvious, in float64.

One document at a time, one element at a time, in plain loops: inputs, positions, who sees whom, labels
and loss are each written the way a person would explain them. Nothing is shared with the fast path but
the weights and `alignment`'s three numbers. Tests demand that the fast path returns the same loss and the
same gradients for any draw, any packing and any number of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from peagle_train.head.alignment import EMBEDDED, PREDICTED, TARGET_OUTPUT
from peagle_train.head.batch import Document
from peagle_train.head.config import SLIDING
from peagle_train.head.model import DrafterHead


def reference_loss(
    head: DrafterHead,
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


def _sees(query: tuple[int, int], key: tuple[int, int], window: int | None) -> bool:
    """May element `query` look at element `key` of the same document, in a layer of this window?"""
    (a, d), (b, e) = query, key
    if window is not None and (a + d) - (b + e) >= window:
        return False
    if e == 0:
        return b <= a  # a real slot at or before the anchor
    return b == a and e <= d  # a mask slot of the own chain, not beyond oneself


def _forward(head: DrafterHead, document: Document, rows: list[tuple[int, int]]) -> list[Tensor]:
    """The final hidden state of every row of one document."""
    config, parameters = head.config, dict(head.named_parameters())
    group = config.num_attention_heads // config.num_key_value_heads

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean() + config.rms_norm_eps).rsqrt() * weight

    def rotate(x: Tensor, position: int) -> Tensor:  # [heads, D]
        half, rope = config.head_dim // 2, config.rope
        turned, frequencies = [], rope.frequencies(config.head_dim).double()
        for i in range(half):
            angle = position / rope.stretch * frequencies[i]
            cos, sin = rope.magnitude * angle.cos(), rope.magnitude * angle.sin()
            turned.append((x[:, i] * cos - x[:, i + half] * sin, x[:, i + half] * cos + x[:, i] * sin))
        return torch.stack([t[0] for t in turned] + [t[1] for t in turned], dim=1)

    def normed_aux(state: Tensor) -> Tensor:
        if config.norm_before_fc:
            state = norm(state, parameters["input_norm.weight"])
        if config.fc_norm:
            width = config.target_hidden_size
            parts = [state[i * width : (i + 1) * width] for i in range(len(config.aux_layers))]
            state = torch.cat([norm(part, parameters[f"fc_norm.{i}.weight"]) for i, part in enumerate(parts)])
        return state

    embeddings, states = [], []
    for a, d in rows:
        token = int(document.token_ids[a + EMBEDDED]) if d == 0 else config.mask_token_id
        state = document.aux[a].double() if d == 0 else parameters["mask_hidden"][0, 0]
        embeddings.append(head.embed_tokens.weight[token])
        states.append(head.fc.weight @ normed_aux(state))

    residuals = states
    for index, layer in enumerate(head.blocks):
        attention = layer.self_attn
        window = config.sliding_window if config.layer_types[index:][:1] == (SLIDING,) else None

        def heads(matrix: nn.Linear, x: Tensor, norm_weight: Tensor | None) -> Tensor:
            """One row through a projection, [heads, D], each head normed if the drafter does that."""
            y = matrix.weight @ x if matrix.bias is None else matrix.weight @ x + matrix.bias
            parts = y.view(-1, config.head_dim)
            return parts if norm_weight is None else torch.stack([norm(part, norm_weight) for part in parts])

        queries, keys, values, stream = [], [], [], []
        for (a, d), embedding, residual in zip(rows, embeddings, residuals, strict=True):
            if index == 0:
                state = norm(residual, layer.hidden_norm.weight)
                x = torch.cat([norm(embedding, layer.input_layernorm.weight), state])
                stream.append(state if config.norm_before_residual else residual)
            else:
                x = norm(residual, layer.input_layernorm.weight)
                stream.append(residual)
            q_norm = parameters.get(f"layers.{index}.self_attn.q_norm.weight")
            k_norm = parameters.get(f"layers.{index}.self_attn.k_norm.weight")
            queries.append(rotate(heads(attention.q_proj, x, q_norm), a + d))
            keys.append(rotate(heads(attention.k_proj, x, k_norm), a + d))
            values.append(heads(attention.v_proj, x, None))
        new_residuals = []
        for i, row in enumerate(rows):
            seen = [j for j in range(len(rows)) if _sees(row, rows[j], window)]
            mixed = []
            for h in range(config.num_attention_heads):
                scores = torch.stack([queries[i][h] @ keys[j][h // group] for j in seen])
                weights = (scores * config.head_dim**-0.5).softmax(0)
                mixed.append(sum(w * values[j][h // group] for w, j in zip(weights, seen, strict=True)))
            x = stream[i] + attention.o_proj.weight @ torch.cat(mixed)
            if attention.o_proj.bias is not None:
                x = x + attention.o_proj.bias
            y = norm(x, layer.post_attention_layernorm.weight)
            gate = layer.mlp.gate_proj.weight @ y
            x = x + layer.mlp.down_proj.weight @ (gate * gate.sigmoid() * (layer.mlp.up_proj.weight @ y))
            new_residuals.append(x)
        residuals = new_residuals
    return [norm(r, head.norm.weight) for r in residuals]
