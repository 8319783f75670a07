"""Answers of the target, batched, with the hidden states of the same pass.

    prompts                  generated                    fed to the target     states kept
    s s . . p p              a a a e                      s s p p a a a         of exactly these
    s s p p p p              a a a a a (max_new_tokens)   s s p p p p a a a a   of exactly these

The last token of a row is never fed, so a row of n tokens has n - 1 states: what the store wants, and
not one pass more than the answer itself costs. What all prompts of a batch begin with (`s`, usually the
system turn) is computed once and its KV cache copied: a quarter of a short prompt. Then comes the
padding, before the tokens that differ. Rows that end leave the batch, with their share of the cache,
once an eighth of the batch has ended: moving the cache costs about as much as a step. Logits are
computed for the last position of each row only.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from data_prep.sampling import Chooser, Draw
from peagle_train.target.adapter import Target


@dataclass(frozen=True)
class Answer:
    """One answered prompt of n tokens in all."""

    token_ids: list[int]  # prompt and answer, n
    prompt_length: int
    finish: Literal["stop", "length"]
    aux: Tensor | None  # [n-1, A*H] in the kept dtype, on the CPU; None if states were not asked for
    last: Tensor | None  # [n-1, H], before the final norm


@torch.no_grad()
def answer(
    target: Target,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    draws: Sequence[Draw] | None = None,
    aux_layers: Sequence[int] = (),
    keep: torch.dtype | None = None,
    on_tokens: Callable[[int], None] | None = None,
) -> list[Answer]:
    """Answers a batch of prompts, until an end token or `max_new_tokens`.

    draws: how each prompt is answered; None: all of them greedily.
    keep: dtype in which the states are kept; None keeps none and taps no layer.
    on_tokens: called after every step with the number of tokens it generated.
    """
    layers = tuple(aux_layers) if keep is not None else ()
    batch, width = len(prompts), max(len(prompt) for prompt in prompts)
    total = width + max_new_tokens
    ends = torch.tensor(target.end_token_ids, device=target.device)
    shared = _shared_length(prompts) if _may_share(target, total) else 0
    padding = [width - len(prompt) for prompt in prompts]
    ids = torch.zeros(batch, width, dtype=torch.long)  # the id under padding is never seen
    mask = torch.ones(batch, total, dtype=torch.long)
    for row, (prompt, pad) in enumerate(zip(prompts, padding, strict=True)):
        ids[row, :shared] = torch.tensor(prompt[:shared])
        ids[row, shared + pad :] = torch.tensor(prompt[shared:])
        mask[row, shared : shared + pad] = 0
    ids, mask = ids.to(target.device), mask.to(target.device)
    positions = mask.cumsum(1).sub_(1).clamp_(min=0)  # [B, total]; padding repeats the position before it
    book = _Book(batch, total, shared, keep)
    chooser = Chooser(draws)
    cache = target.new_cache()

    rows = torch.arange(batch)  # which prompt each live row of the batch is
    running = torch.ones(batch, dtype=torch.bool)
    if shared:
        tapped = target.forward(ids[:1, :shared], aux_layers=layers, cache=cache)
        cache.select(torch.zeros(batch, dtype=torch.long))
        book.keep_states(rows, 0, tapped.aux, tapped.last)
    start, feed = shared, ids[:, shared:]
    for step in range(max_new_tokens):
        stop = width + step
        tapped = target.forward(
            feed,
            aux_layers=layers,
            cache=cache,
            attention_mask=mask[:, :stop],
            position_ids=positions[:, start:stop],
        )
        book.keep_states(rows, start, tapped.aux, tapped.last)
        chosen = chooser.choose(target.logits(tapped.last[:, -1]), rows)  # [b]
        book.keep_tokens(rows[running], chosen.cpu()[running])
        if on_tokens is not None:
            on_tokens(int(running.sum()))
        running &= ~torch.isin(chosen, ends).cpu()
        alive = int(running.sum())
        if alive == 0:
            break
        start, feed = stop, chosen[:, None]
        if alive <= len(rows) - max(1, len(rows) // 8):
            live = running.nonzero()[:, 0]
            cache.select(live)
            on_device = live.to(target.device)
            mask, positions, feed = mask[on_device], positions[on_device], feed[on_device]
            rows, running = rows[live], running[live]
    return [
        book.answer(row, list(prompt), padding[row], target.end_token_ids)
        for row, prompt in enumerate(prompts)
    ]


class _Book:
    """What a batch has generated so far, by prompt."""

    def __init__(self, batch: int, total: int, shared: int, keep: torch.dtype | None):
        self._batch, self._total, self._shared, self._keep = batch, total, shared, keep
        self._tokens: list[list[int]] = [[] for _ in range(batch)]
        self._aux = self._last = torch.empty(0)

    def keep_tokens(self, rows: Tensor, chosen: Tensor) -> None:
        for row, token in zip(rows.tolist(), chosen.tolist(), strict=True):
            self._tokens[row].append(token)

    def keep_states(self, rows: Tensor, start: int, aux: Tensor, last: Tensor) -> None:
        """aux [b or 1, s, A*H] and last [b or 1, s, H] of the columns from `start` on."""
        if self._keep is None:
            return
        if not self._last.numel():  # [B, width + max_new_tokens - 1, .]: the last token is never fed
            self._aux = torch.zeros(self._batch, self._total - 1, aux.shape[-1], dtype=self._keep)
            self._last = torch.zeros(self._batch, self._total - 1, last.shape[-1], dtype=self._keep)
        stop = start + last.shape[1]
        self._aux[rows, start:stop] = aux.to("cpu", self._keep)
        self._last[rows, start:stop] = last.to("cpu", self._keep)

    def answer(self, row: int, prompt: list[int], pad: int, ends: Sequence[int]) -> Answer:
        token_ids = prompt + self._tokens[row]
        finish: Literal["stop", "length"] = "stop" if token_ids[-1] in ends else "length"
        if self._keep is None:
            return Answer(token_ids, len(prompt), finish, None, None)
        columns = torch.arange(len(token_ids) - 1)
        columns[self._shared :] += pad
        return Answer(token_ids, len(prompt), finish, self._aux[row, columns], self._last[row, columns])


def _shared_length(prompts: Sequence[Sequence[int]]) -> int:
    """Tokens with which all prompts begin; each keeps at least one of its own. 0 for a single prompt."""
    if len(prompts) < 2:
        return 0
    most = min(len(prompt) for prompt in prompts) - 1
    first = prompts[0]
    return next((i for i in range(most) if any(prompt[i] != first[i] for prompt in prompts)), most)


def _may_share(target: Target, total: int) -> bool:
    """Whether padding may stand between a prompt's tokens: not where a sliding window counts columns."""
    config = target.model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ())
    window = getattr(config, "sliding_window", None)
    return window is None or kinds == {"full_attention"} or total <= window
