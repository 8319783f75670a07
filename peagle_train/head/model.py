"""The drafter head, as vLLM 0.32 computes it (`vllm/model_executor/models/{llama,qwen3}_eagle3.py`).

    embedding of x[i+1] ─ input_layernorm ─┐
                                           ├─ [2H] ─ q/k/v ─ attention ─ o ┐
    aux states ─ fc ─┬─ hidden_norm ──┬────┘                              │
                     └─────────── or ─┴─ residual ───────────────────────(+)─ MLP ─ layers 1.. ─ norm

A mask slot takes the mask token's embedding and `fc(mask_hidden)` instead; RoPE alone tells mask
slots apart. `HeadConfig` says which options exist: norms before `fc`, the residual taken behind
hidden_norm, norms on queries and keys, biases, windows. Parameter names are vLLM's tensor names, so
exporting renames nothing.

A layer is written once; who walks through the layers differs in the attention: the slow mask of the rule,
KV-cached drafting and EAGLE-3's unroll hand an attention object to `body`, training walks in two streams
(`streams.py`). So the head has no `forward` of its own: `forward.py` has it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch import Tensor, nn

from peagle_train.head.attention import Attention
from peagle_train.head.config import HeadConfig
from peagle_train.head.fused import gated_down, rms_norm, rotate
from peagle_train.head.matmul import Linear


class RMSNorm(nn.Module):
    """Root-mean-square norm, computed in at least float32."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return rms_norm(x, self.weight, self.eps)


class SelfAttention(nn.Module):
    """Grouped-query attention; `width` is the input's width (2H in layer 0)."""

    def __init__(self, config: HeadConfig, width: int):
        super().__init__()
        self.heads, self.kv_heads, self.dim = (
            config.num_attention_heads,
            config.num_key_value_heads,
            config.head_dim,
        )
        bias = config.attention_bias
        self.q_proj = Linear(width, self.heads * self.dim, bias=bias)
        self.k_proj = Linear(width, self.kv_heads * self.dim, bias=bias)
        self.v_proj = Linear(width, self.kv_heads * self.dim, bias=bias)
        # vLLM's Llama layers take attention_bias for the output projection too, its Qwen3 layers do not.
        self.o_proj = Linear(
            self.heads * self.dim, config.hidden_size, bias=bias and config.drafter == "llama"
        )
        self.q_norm = self.k_norm = None
        if config.drafter == "qwen3":
            self.q_norm = RMSNorm(self.dim, config.rms_norm_eps)
            self.k_norm = RMSNorm(self.dim, config.rms_norm_eps)

    def queries(self, x: Tensor) -> Tensor:
        """[N, Hq, D], not yet rotated."""
        q = self.q_proj(x).unflatten(-1, (self.heads, self.dim))
        return q if self.q_norm is None else self.q_norm(q)

    def keys_and_values(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """k (not yet rotated) and v, [N, Hkv, D]."""
        k = self.k_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        v = self.v_proj(x).unflatten(-1, (self.kv_heads, self.dim))
        return k if self.k_norm is None else self.k_norm(k), v


class MLP(nn.Module):
    """SwiGLU."""

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.gate_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.up_proj = Linear(config.hidden_size, config.intermediate_size, bias=False)
        self.down_proj = Linear(config.intermediate_size, config.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return gated_down(self.gate_proj(x), self.up_proj(x), self.down_proj.weight)


class Layer(nn.Module):
    """One decoder layer; layer 0 is wide."""

    def __init__(self, config: HeadConfig, index: int):
        super().__init__()
        wide = index == 0
        self.input_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if wide:
            self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.self_attn = SelfAttention(config, config.hidden_size * (2 if wide else 1))
        self.post_attention_layernorm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.mlp = MLP(config)
        self.norm_before_residual = config.norm_before_residual

    def enter(self, embeddings: Tensor, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Layer 0: what attention reads [U, 2H], and the residual stream [U, H], of input rows [U, H]."""
        state = self.hidden_norm(hidden)
        x = torch.cat([self.input_layernorm(embeddings), state], -1)
        return x, state if self.norm_before_residual else hidden

    def finish(self, residual: Tensor, mixed: Tensor) -> Tensor:
        """The residual stream [N, H] behind the layer, from that before it and attention's [N, Hq, D]."""
        residual = residual + self.self_attn.o_proj(mixed.flatten(-2))
        return residual + self.mlp(self.post_attention_layernorm(residual))


class DrafterHead(nn.Module):
    """The head. See the module's drawing.

    Buffers and parameters beyond the layers: `mask_hidden` [1, 1, A*TH] (None for eagle3);
    `input_norm`, `fc_norm` where the config asks for them; `embed_tokens` (present always, trained only
    if the config says own embeddings); `d2t` [DV] int64, the OFFSET from draft id to target id, None
    when the vocabulary is full.
    """

    d2t: Tensor | None
    mask_hidden: nn.Parameter | None

    def __init__(self, config: HeadConfig):
        super().__init__()
        self.config = config
        eps = config.rms_norm_eps
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.embed_tokens.weight.requires_grad_(config.own_embeddings)
        width = config.aux_width
        mask = nn.Parameter(torch.zeros(1, 1, width)) if config.method == "peagle" else None
        self.register_parameter("mask_hidden", mask)
        self.input_norm = RMSNorm(width, eps) if config.norm_before_fc else None
        self.fc_norm = (
            nn.ModuleList(RMSNorm(config.target_hidden_size, eps) for _ in config.aux_layers)
            if config.fc_norm
            else None
        )
        self.fc = Linear(width, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([Layer(config, i) for i in range(config.num_layers)])
        self.norm = RMSNorm(config.hidden_size, eps)
        self.lm_head = Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        offsets = (
            torch.zeros(config.draft_vocab_size, dtype=torch.int64) if config.reduced_vocabulary else None
        )
        self.register_buffer("d2t", offsets)

    @property
    def blocks(self) -> list[Layer]:
        """The decoder layers, typed."""
        return cast(list[Layer], list(self.layers))

    @property
    def draft_token_ids(self) -> Tensor:
        """[DV] int64, the target id of every draft id."""
        ids = torch.arange(self.config.draft_vocab_size, device=self.lm_head.weight.device)
        return ids if self.d2t is None else ids + self.d2t

    def set_draft_tokens(self, token_ids: Tensor) -> None:
        """Fixes the map of a reduced vocabulary. token_ids [DV]: rising target ids without repeats."""
        if self.d2t is None:
            raise ValueError("this head drafts the whole vocabulary; it has no map to set")
        if token_ids.shape != self.d2t.shape or not bool((token_ids[1:] > token_ids[:-1]).all()):
            raise ValueError(f"draft token ids must be {self.d2t.shape[0]} rising target ids")
        self.d2t.copy_(token_ids - torch.arange(token_ids.shape[0]))

    def fuse(self, aux: Tensor) -> Tensor:
        """The state that enters layer 0: aux [N, A*TH] -> [N, H]."""
        if self.input_norm is not None:
            aux = self.input_norm(aux)
        if self.fc_norm is not None:
            parts = aux.chunk(len(self.fc_norm), -1)
            aux = torch.cat([norm(part) for norm, part in zip(self.fc_norm, parts, strict=True)], -1)
        return self.fc(aux)

    def embed(self, token_ids: Tensor, aux: Tensor, mask_slots: bool) -> tuple[Tensor, Tensor]:
        """What enters layer 0: one row per real slot, then one row that stands for all mask slots.

        Args:
            token_ids: [T] token embedded by each real slot.
            aux: [T, A*TH] target states.
            mask_slots: append the mask row (peagle only).

        Returns:
            embeddings and hidden, each [T or T + 1, H].
        """
        aux = aux.to(self.fc.weight.dtype)
        if mask_slots:
            if self.mask_hidden is None or self.config.mask_token_id is None:
                raise ValueError(f"a {self.config.method} head has no mask slots")
            aux = torch.cat([aux, self.mask_hidden.view(1, -1)])
            token_ids = torch.cat([token_ids, token_ids.new_tensor([self.config.mask_token_id])])
        return self.embed_tokens(token_ids), self.fuse(aux)

    def body(
        self,
        embeddings: Tensor,
        hidden: Tensor,
        positions: Tensor,
        attentions: Sequence[Attention],
        spread: Tensor | None = None,
        rows: Tensor | None = None,
    ) -> Tensor:
        """All layers, without the final norm.

        Args:
            embeddings: [U, H] distinct input rows.
            hidden: [U, H] fused states of the same rows.
            positions: [N] RoPE position of every row.
            attentions: one attention per layer.
            spread: [N] which input row each row starts as; None: N = U, in order. Mask slots all
                start as one row, whose layer-0 projections are computed once.
            rows: [E] rows whose output is wanted; None: all. The last layer's MLP runs for them alone.

        Returns:
            [E or N, H], the residual stream: `logits` reads it, eagle3 feeds it back (`next_state`).
        """
        cos, sin = self.turns(positions, hidden.dtype)
        residual = hidden
        for index, (layer, attend) in enumerate(zip(self.blocks, attentions, strict=True)):
            if index == 0:
                x, residual = layer.enter(embeddings, hidden)
            else:
                x = layer.input_layernorm(residual)
            q, (k, v) = layer.self_attn.queries(x), layer.self_attn.keys_and_values(x)
            if index == 0 and spread is not None:
                q, k, v, residual = q[spread], k[spread], v[spread], residual[spread]
            mixed = attend(rotate(q, cos, sin), rotate(k, cos, sin), v)
            if index == len(self.layers) - 1 and rows is not None:
                mixed, residual = mixed[rows], residual[rows]
            residual = layer.finish(residual, mixed)
        return residual

    def logits(self, residual: Tensor) -> Tensor:
        """Draft logits [N, DV] of `body`'s output [N, H]."""
        return self.lm_head(self.norm(residual))

    def next_state(self, residual: Tensor) -> Tensor:
        """What eagle3's next step reads in place of a fused target state; [N, H] from `body`'s [N, H]."""
        return self.norm(residual) if self.config.norm_output else residual

    def turns(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """cos and sin of positions [N], each [N, 1, D/2], computed in at least float32.

        Frequencies are float32, as the server computes them, whatever the head's dtype: rounded to
        bfloat16 they would turn far positions by whole radians. They are no buffer, so no cast of the
        head reaches them.
        """
        wide = positions.to(torch.promote_types(dtype, torch.float32))
        cos, sin = self.config.rope.angles(wide, self.config.head_dim)
        return cos[:, None].to(dtype), sin[:, None].to(dtype)
