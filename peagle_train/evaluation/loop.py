"""Speculative decoding, greedy, one sequence: short enough to hold in the head.

    prefill   the target reads the prompt and gives x[n], the first new token
    draft     the head reads the new (token, state) pairs and proposes K tokens (peagle: in one pass)
    verify    the target reads x[n] and the K drafts in one pass; its own choices follow each of them
    accept    leading drafts that equal those choices, plus one token of the target's own
    forget    the caches lose what was rejected; the head's own drafting leaves nothing behind

The output is the target's greedy output, whatever the head proposes.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from peagle_train.head.acceptance import Acceptance
from peagle_train.head.model import DrafterHead
from peagle_train.head.session import DraftSession
from peagle_train.target.adapter import Target

NEAR_TIE = 1e-3
"""Two logits closer than this may change places between a pass over one token and a pass over K + 1."""


@dataclass
class Speculated:
    """What the loop produced: the new tokens, the counts, and every round's drafts."""

    token_ids: list[int]
    acceptance: Acceptance
    drafts: list[list[int]] = field(default_factory=list)


@dataclass
class Greedy:
    """A plain greedy continuation and, per token, the gap between the target's two best logits."""

    token_ids: list[int]
    gaps: list[float]


@torch.no_grad()
def speculate(
    target: Target,
    head: DrafterHead,
    prompt_ids: list[int],
    k: int,
    max_new_tokens: int,
    *,
    count_past_end: bool = False,
) -> Speculated:
    """Continues a prompt by draft and verification.

    Args:
        target: the verifier.
        head: the drafter; on the target's device.
        prompt_ids: at least one token.
        k: drafts per round.
        max_new_tokens: the answer ends here, or after an end token.
        count_past_end: count accepted drafts that lie past the end of the answer. They are never
            delivered, so by default they do not count; vLLM counts them.
    """
    aux_layers = head.config.aux_layers
    cache, session = target.new_cache(), DraftSession(head)
    states = target.forward(_row(prompt_ids, target), aux_layers=aux_layers, cache=cache)
    answer = [int(target.logits(states.last[0, -1]).argmax())]
    fed = [*prompt_ids[1:], answer[0]]  # x[i+1] of the slots the session has not seen
    aux = states.aux[0]
    result = Speculated(answer, Acceptance(k))
    while not _ended(answer, max_new_tokens, target):
        drafts, _ = session.draft(torch.tensor(fed, device=target.device), aux, k)
        proposal = drafts.tolist()
        states = target.forward(_row([answer[-1], *proposal], target), aux_layers=aux_layers, cache=cache)
        choices = target.logits(states.last[0]).argmax(-1).tolist()
        accepted = 0
        while accepted < k and proposal[accepted] == choices[accepted]:
            accepted += 1
        delivered = _cut(choices[: accepted + 1], max_new_tokens - len(answer), target.end_token_ids)
        result.acceptance.add_round(accepted if count_past_end else min(accepted, len(delivered)))
        result.drafts.append(proposal)
        answer.extend(delivered)
        cache.crop(len(prompt_ids) + len(answer) - 1)
        fed, aux = delivered, states.aux[0, : len(delivered)]
    return result


@torch.no_grad()
def greedy(target: Target, prompt_ids: list[int], max_new_tokens: int) -> Greedy:
    """Plain greedy decoding, one token per pass: what the loop must reproduce."""
    cache = target.new_cache()
    tokens, result = prompt_ids, Greedy([], [])
    while not _ended(result.token_ids, max_new_tokens, target):
        states = target.forward(_row(tokens, target), aux_layers=(), cache=cache)
        best = target.logits(states.last[0, -1]).topk(2)
        result.token_ids.append(int(best.indices[0]))
        result.gaps.append(float(best.values[0] - best.values[1]))
        tokens = result.token_ids[-1:]
    return result


@torch.no_grad()
def gap_after(target: Target, token_ids: list[int]) -> float:
    """How far the target's two best logits lie apart after these tokens."""
    states = target.forward(_row(token_ids, target), aux_layers=())
    best = target.logits(states.last[0, -1]).topk(2).values
    return float(best[0] - best[1])


def first_difference(ours: list[int], plain: list[int]) -> int | None:
    """Index of the first differing token (a missing one differs), None when the two are equal."""
    for index, (a, b) in enumerate(zip(ours, plain, strict=False)):
        if a != b:
            return index
    return None if len(ours) == len(plain) else min(len(ours), len(plain))


def _row(token_ids: list[int], target: Target) -> Tensor:
    return torch.tensor([token_ids], device=target.device)


def _ended(answer: list[int], max_new_tokens: int, target: Target) -> bool:
    return len(answer) >= max_new_tokens or bool(answer and answer[-1] in target.end_token_ids)


def _cut(tokens: list[int], room: int, end_token_ids: tuple[int, ...]) -> list[int]:
    """The tokens up to the answer's end: its length limit, or its first end token."""
    for index, token in enumerate(tokens[:room]):
        if token in end_token_ids:
            return tokens[: index + 1]
    return tokens[:room]
