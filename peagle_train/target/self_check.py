"""A target proves itself when it is loaded: what the adapter reads is what the model computes.

The families table says what is peculiar about a class. Whatever it does not say (a scale on the logits, a
cap, a mask of another kind) would make taps or distributions silently wrong, and a head trained on them
worthless. So a short text goes through the model's own forward and through the adapter:

    taps          ids 0 .. L-1 against hidden_states, and the norm of `last` against its last entry
    logits        against the model's own
    cache         the text in two parts against the text in one: only a causal model passes
    padding       a row padded on the left, in a batch, against the row alone

Four passes over a dozen tokens: milliseconds for a small model, a few times one decoding step for any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from peagle_train.errors import PeagleError

if TYPE_CHECKING:
    from peagle_train.target.adapter import Target

_TEXT = "The 3 brown foxes jump; who counts them twice?"
_LENGTH, _PART = 12, 5
# Largest difference against the largest value, where both sides do the same operations in the same shapes
# (float32, and narrower: a cap is computed in the model's dtype, here in float32) ...
_SAME = {torch.float32: 1e-4}
_SAME_NARROW = 3e-2
# ... and the middle token's distance where shapes differ: rounding flips a rare expert, not half of them.
_NEAR = {torch.float32: 1e-3}
_NEAR_NARROW = 0.2


class Compared(NamedTuple):
    """One comparison of the adapter with the model itself.

    name: taps, final norm, distribution, cache or padding. found: what differs, in words. apart: by how much,
    against the values themselves; at most `limit` where all is well. needed: what would describe the class.
    """

    name: str
    found: str
    apart: float
    limit: float
    needed: str

    @property
    def holds(self) -> bool:
        return self.apart <= self.limit  # NaN does not


def self_check(target: Target) -> None:
    """Raises PeagleError, naming what differs and what would be needed, unless all comparisons hold."""
    for compared in comparisons(target):
        if not compared.holds:
            raise _refused(target, compared.found, compared.needed)


@torch.no_grad()
def comparisons(target: Target) -> Iterator[Compared]:
    """All comparisons, one after the other. Raises PeagleError where none is possible: tables, tokenizer."""
    _check_tables(target)
    ids = _probe(target)
    depth, same = target.facts.num_layers, _SAME.get(target.dtype, _SAME_NARROW)
    own = target.model(input_ids=ids, output_hidden_states=True, use_cache=False)
    tapped = target.forward(ids, aux_layers=range(depth + 1))
    last = tapped.last

    *states, final = own.hidden_states
    taps = tapped.aux.chunk(depth + 1, dim=-1)[:depth]
    off = [_difference(tap, state) for tap, state in zip(taps, states, strict=True)]
    layer = next((layer for layer, apart in enumerate(off) if not apart <= same), off.index(_worst(*off)))
    outside = "an entry that says what happens to states outside the decoder layers"
    found = f"the tap of aux layer {layer} differs from hidden_states[{layer}] of transformers"
    yield Compared("taps", f"{found} by {off[layer]:.2g} of its range", off[layer], same, outside)

    apart = _difference(target.normed(last), final)
    found = f"the final norm of the last layer differs from hidden_states[{depth}] of transformers"
    yield Compared("final norm", f"{found} by {apart:.2g} of its range", apart, same, outside)

    apart = _difference(target.logits(last), own.logits)
    yield Compared(
        "distribution",
        f"its logits differ from those of the model's own forward by {apart:.2g} of their range",
        apart,
        same,
        "an entry that says what stands between the final norm and the logits (a scale, a cap, a bias)",
    )

    near, cache = _NEAR.get(target.dtype, _NEAR_NARROW), target.new_cache()
    parts = [
        target.forward(part, aux_layers=(), cache=cache).last for part in (ids[:, :_PART], ids[:, _PART:])
    ]
    apart = _distance(torch.cat(parts, dim=1), last)
    yield Compared(
        "cache",
        f"states of a text read in two parts with a KV cache are {apart:.2g} away from those read in one",
        apart,
        near,
        "a causal model whose masks follow its cache: peagle_train/target/cache.py must learn what it "
        "keeps between passes",
    )

    alone = target.forward(ids[:, _PART:], aux_layers=()).last
    mask = torch.ones(2, _LENGTH, dtype=torch.long, device=target.device)
    mask[1, :_PART] = 0
    batched = target.forward(ids.expand(2, -1), aux_layers=(), attention_mask=mask).last
    apart = _worst(_distance(batched[1:, _PART:], alone), _distance(batched[:1], last))
    yield Compared(
        "padding",
        f"states of a row padded on the left are {apart:.2g} away from those of the row alone",
        apart,
        near,
        "a model that heeds attention_mask and position_ids",
    )


def _probe(target: Target) -> Tensor:
    """The short text's ids [1, _LENGTH]."""
    ids = target.tokenizer(_TEXT, add_special_tokens=False)["input_ids"]
    if not ids:
        raise PeagleError(f"target {target.facts.model}: its tokenizer finds no token in {_TEXT!r}")
    if max(ids) >= target.facts.vocab_size:
        raise PeagleError(
            f"target {target.facts.model}: its tokenizer writes id {max(ids)}, but its table has only "
            f"{target.facts.vocab_size} rows; put the tokenizer beside it that it was trained with"
        )
    return torch.tensor([(ids * _LENGTH)[:_LENGTH]], device=target.device)


def _check_tables(target: Target) -> None:
    shape = (target.facts.vocab_size, target.facts.hidden_size)
    for name, table in (("embedding", target.embedding_table()), ("output", target.head_table())):
        if table.shape != shape or not table.is_floating_point():
            raise _refused(
                target,
                f"its {name} table is {list(table.shape)} of {table.dtype}, its config says {list(shape)}",
                "a plain table in floating point; load weights that are not quantised there",
            )


def _difference(ours: Tensor, own: Tensor) -> float:
    """The largest difference of two tensors of one shape against the largest value; nan stays nan."""
    ours, own = ours.float(), own.float()
    return float((ours - own).abs().max() / own.abs().max())


def _distance(ours: Tensor, own: Tensor) -> float:
    """How far the middle token's state [B, S, H] is off, against its length."""
    ours, own = ours.float(), own.float()
    return float(((ours - own).norm(dim=-1) / own.norm(dim=-1)).median())


def _worst(*apart: float) -> float:
    """The largest; NaN, which no comparison keeps, is larger than all."""
    return next((value for value in apart if math.isnan(value)), max(apart))


def _refused(target: Target, found: str, needed: str) -> PeagleError:
    return PeagleError(
        f"target {target.facts.model} ({target.facts.class_name}): {found}, so a head would learn from wrong "
        f"states or distributions. Needed in peagle_train/target/families.py: {needed}."
    )
