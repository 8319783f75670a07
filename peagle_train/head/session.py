"""Drafting with a KV cache, the way a server does it.

Known tokens x[0..n], target states h[0..n-1]. The session has cached the slots it was fed before; it
is now fed the new ones (slot i = x[i+1], h[i]), whose last gives the first draft.

    peagle   K - 1 mask slots lie behind them in the same pass and give the other drafts
    eagle3   K - 1 passes of one row follow, each fed with the last draft and the state it came from

What lies behind the real slots leaves no keys: the next round's real slots take its positions.
"""

from __future__ import annotations

import torch
from torch import Tensor

from peagle_train.head.model import DrafterHead


class CachedLayer:
    """Causal attention of new rows over a growing cache, one layer. Row i of the cache sits at position i."""

    def __init__(self, window: int | None) -> None:
        self.window = window
        self.k: Tensor | None = None
        self.v: Tensor | None = None

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        self.k = k if self.k is None else torch.cat([self.k, k])
        self.v = v if self.v is None else torch.cat([self.v, v])
        group = q.shape[1] // k.shape[1]
        keys, values = self.k.repeat_interleave(group, 1), self.v.repeat_interleave(group, 1)
        scores = torch.einsum("ihd,jhd->hij", q, keys) * q.shape[-1] ** -0.5
        new, total = q.shape[0], keys.shape[0]
        rows = torch.arange(total, device=q.device)
        back = rows[total - new :, None] - rows
        unseen = back < 0
        if self.window is not None:
            unseen = unseen | (back >= self.window)
        weights = scores.masked_fill(unseen, float("-inf")).softmax(-1)
        return torch.einsum("hij,jhd->ihd", weights, values)

    def crop(self, length: int) -> None:
        assert self.k is not None and self.v is not None
        self.k, self.v = self.k[:length], self.v[:length]


class DraftSession:
    """One sequence's drafting state."""

    def __init__(self, head: DrafterHead):
        self.head = head
        self.layers = [CachedLayer(window) for window in head.config.windows]
        self.length = 0

    @torch.no_grad()
    def draft(self, next_tokens: Tensor, aux: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Feeds m new slots and drafts K tokens.

        Args:
            next_tokens: [m] int64, m >= 1; x[i+1] of the new slots i = length .. length + m - 1.
            aux: [m, A*TH] the target's states h[i] of the same slots.
            k: how many tokens to draft.

        Returns:
            drafts [k] (target ids) and logits [k, DV].
        """
        method = self._in_one_pass if self.head.config.method == "peagle" else self._one_by_one
        logits = method(next_tokens, aux, k)
        self.length += next_tokens.shape[0]
        for layer in self.layers:
            layer.crop(self.length)
        return self.head.draft_token_ids[logits.argmax(-1)], logits

    def _in_one_pass(self, next_tokens: Tensor, aux: Tensor, k: int) -> Tensor:
        """peagle's logits [k, DV]."""
        head, m = self.head, next_tokens.shape[0]
        embeddings, hidden = head.embed(next_tokens, aux, mask_slots=k > 1)
        rows = torch.arange(m + k - 1, device=next_tokens.device)
        spread, wanted = rows.clamp(max=m), rows[m - 1 :]
        return head.logits(head.body(embeddings, hidden, self.length + rows, self.layers, spread, wanted))

    def _one_by_one(self, next_tokens: Tensor, aux: Tensor, k: int) -> Tensor:
        """eagle3's logits [k, DV]."""
        head = self.head
        embeddings, hidden = head.embed(next_tokens, aux, mask_slots=False)
        positions = self.length + torch.arange(next_tokens.shape[0], device=next_tokens.device)
        last = torch.tensor([positions.shape[0] - 1], device=next_tokens.device)
        residual = head.body(embeddings, hidden, positions, self.layers, rows=last)
        logits = [head.logits(residual)]
        for step in range(1, k):
            drafted = head.draft_token_ids[logits[-1].argmax(-1)]
            state = head.next_state(residual)
            residual = head.body(head.embed_tokens(drafted), state, positions[-1:] + step, self.layers)
            logits.append(head.logits(residual))
        return torch.cat(logits)
