"""The whole computation once more, slow and obvious, in float64.

One document at a time, one element at a time, in plain loops: inputs, positions, who sees whom, labels
and loss are each written the way a person would explain them. peagle and eagle3 differ in the inputs of
the elements behind the real slots, and share the rest. Nothing is shared with the fast path but
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

Element = tuple[int, int]
"""(anchor, depth)."""


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
        outputs = _forward(head, document, rows)
        for a, d in elements:
            label = int(document.token_ids[a + d + PREDICTED])
            log_draft = (head.lm_head.weight @ outputs[a, d]).log_softmax(-1)
            if kind == "ce":
                if label in draft_ids:
                    loss = loss - log_draft[draft_ids.index(label)]
                    count += 1
                continue
            state = document.outputs(torch.tensor([a + d + TARGET_OUTPUT]))[0].double()
            state = state * (state.square().mean() + head.config.rms_norm_eps).rsqrt() * output_norm
            target = (output_weight[draft_ids] @ state).softmax(-1).detach()
            loss = loss + (target * (target.log() - log_draft)).sum()
            count += 1
    return loss, count


def _sees(query: Element, key: Element, window: int | None) -> bool:
    """May element `query` look at element `key` of the same document, in a layer of this window?"""
    (a, d), (b, e) = query, key
    if window is not None and (a + d) - (b + e) >= window:
        return False
    if e == 0:
        return b <= a  # a real slot at or before the anchor
    return b == a and e <= d  # of the own chain, not beyond oneself


def _forward(head: DrafterHead, document: Document, rows: list[Element]) -> dict[Element, Tensor]:
    """The final hidden state of every row of one document: real slots first, then deeper elements."""
    config, layers = head.config, _Layers(head)
    tokens, embed, mask = document.token_ids, head.embed_tokens.weight, config.mask_token_id
    inputs = {
        (a, d): (embed[tokens[a + EMBEDDED]], layers.fused(document.aux[a].double()))
        for a, d in rows
        if d == 0
    }
    if config.method == "peagle":
        inputs |= {
            (a, d): (embed[mask], layers.fused(layers.parameters["mask_hidden"][0, 0]))
            for a, d in rows
            if d > 0
        }
    residuals = layers(inputs)
    for a, d in sorted(rows, key=lambda row: row[1]):
        if (a, d) not in residuals:  # a step of eagle3: what the server would do, one element at a time
            state = residuals[a, d - 1]
            state = layers.norm(state, head.norm.weight) if config.norm_output else state
            residuals |= layers({(a, d): (embed[tokens[a + d + EMBEDDED]], state)})
    return {row: layers.norm(residual, head.norm.weight) for row, residual in residuals.items()}


class _Layers:
    """The decoder layers over the elements of one document; every element seen before stays visible."""

    def __init__(self, head: DrafterHead):
        self.head, self.config, self.parameters = head, head.config, dict(head.named_parameters())
        self.memory: list[dict[Element, tuple[Tensor, Tensor]]] = [{} for _ in head.blocks]

    def __call__(self, inputs: dict[Element, tuple[Tensor, Tensor]]) -> dict[Element, Tensor]:
        """The residual stream behind the last layer, of new elements with their embedding and state."""
        residuals = {row: state for row, (_, state) in inputs.items()}
        for index, layer in enumerate(self.head.blocks):
            attention, memory = layer.self_attn, self.memory[index]
            queries, stream = {}, {}
            for row, residual in residuals.items():
                if index == 0:
                    state = self.norm(residual, layer.hidden_norm.weight)
                    x = torch.cat([self.norm(inputs[row][0], layer.input_layernorm.weight), state])
                    stream[row] = state if self.config.norm_before_residual else residual
                else:
                    x = self.norm(residual, layer.input_layernorm.weight)
                    stream[row] = residual
                position = row[0] + row[1]
                q_norm = self.parameters.get(f"layers.{index}.self_attn.q_norm.weight")
                k_norm = self.parameters.get(f"layers.{index}.self_attn.k_norm.weight")
                queries[row] = self.rotate(self.heads(attention.q_proj, x, q_norm), position)
                key = self.rotate(self.heads(attention.k_proj, x, k_norm), position)
                memory[row] = key, self.heads(attention.v_proj, x, None)
            for row in residuals:
                x = stream[row] + attention.o_proj.weight @ self.mixed(index, row, queries[row])
                if attention.o_proj.bias is not None:
                    x = x + attention.o_proj.bias
                y = self.norm(x, layer.post_attention_layernorm.weight)
                gate = layer.mlp.gate_proj.weight @ y
                up = gate * gate.sigmoid() * (layer.mlp.up_proj.weight @ y)
                residuals[row] = x + layer.mlp.down_proj.weight @ up
        return residuals

    def mixed(self, index: int, row: Element, query: Tensor) -> Tensor:
        """What attention brings to one row, all heads side by side."""
        config = self.config
        window = config.sliding_window if config.layer_types[index:][:1] == (SLIDING,) else None
        seen = [kv for other, kv in self.memory[index].items() if _sees(row, other, window)]
        group = config.num_attention_heads // config.num_key_value_heads
        mixed = []
        for h in range(config.num_attention_heads):
            scores = torch.stack([query[h] @ key[h // group] for key, _ in seen])
            weights = (scores * config.head_dim**-0.5).softmax(0)
            mixed.append(sum(w * value[h // group] for w, (_, value) in zip(weights, seen, strict=True)))
        return torch.cat(mixed)

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return x * (x.square().mean() + self.config.rms_norm_eps).rsqrt() * weight

    def rotate(self, x: Tensor, position: int) -> Tensor:  # [heads, D]
        half, rope = self.config.head_dim // 2, self.config.rope
        turned, frequencies = [], rope.frequencies(self.config.head_dim).double()
        for i in range(half):
            angle = position / rope.stretch * frequencies[i]
            cos, sin = rope.magnitude * angle.cos(), rope.magnitude * angle.sin()
            turned.append((x[:, i] * cos - x[:, i + half] * sin, x[:, i + half] * cos + x[:, i] * sin))
        return torch.stack([t[0] for t in turned] + [t[1] for t in turned], dim=1)

    def heads(self, matrix: nn.Linear, x: Tensor, norm_weight: Tensor | None) -> Tensor:
        """One row through a projection, [heads, D], each head normed if the drafter does that."""
        y = matrix.weight @ x if matrix.bias is None else matrix.weight @ x + matrix.bias
        parts = y.view(-1, self.config.head_dim)
        return parts if norm_weight is None else torch.stack([self.norm(p, norm_weight) for p in parts])

    def fused(self, state: Tensor) -> Tensor:
        """A tapped state through the norms before `fc`, and `fc`."""
        config = self.config
        if config.norm_before_fc:
            state = self.norm(state, self.parameters["input_norm.weight"])
        if config.fc_norm:
            parts = state.split(config.target_hidden_size)
            norms = [self.parameters[f"fc_norm.{i}.weight"] for i in range(len(config.aux_layers))]
            state = torch.cat([self.norm(part, norm) for part, norm in zip(parts, norms, strict=True)])
        return self.head.fc.weight @ state
