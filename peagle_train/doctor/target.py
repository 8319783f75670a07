"""The target: its config, its files, its weights; what the adapter reads of it, and how it turns."""

from __future__ import annotations

import time
from collections.abc import Iterator

import torch
from rich.console import Console
from torch import Tensor

from peagle_train.doctor.patient import Line, Patient, failure, ok
from peagle_train.recipe import check_against_target
from peagle_train.recipe.head import head_rope
from peagle_train.target.adapter import Target
from peagle_train.target.families import family_of
from peagle_train.target.self_check import comparisons
from peagle_train.target.source import describe, obtain
from peagle_train.target.tokens import end_tokens_of

_PLACES = (0, 1, 2, 17, 131, 1023, 4095)
_SAME = 5e-3  # of cos and sin: angles are float32, and a place of 4,095 multiplies their last bit


def config(patient: Patient) -> Iterator[Line]:
    """Read without weights, and the recipe held against it."""
    recipe = patient.recipe
    facts = patient.facts = describe(recipe.target)
    check_against_target(recipe, facts, patient.loaded.places.source, patient.loaded.places)
    yield ok(
        f"{facts.class_name}, {facts.num_layers} layers, hidden size {facts.hidden_size:,}, "
        f"{facts.vocab_size:,} tokens, context {facts.max_position_embeddings:,}; the recipe fits it"
    )


def files(patient: Patient) -> Iterator[Line]:
    """Weights if they are wanted, tokenizer and chat template in any case."""
    from transformers import AutoTokenizer

    section = patient.recipe.target
    folder = patient.folder = obtain(section, Console(quiet=True), weights=patient.weights)
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=section.trust_remote_code)
    patient.tokenizer = tokenizer
    if len(tokenizer) > patient.facts.vocab_size:
        yield failure(
            f"its tokenizer has {len(tokenizer):,} tokens, its table {patient.facts.vocab_size:,} rows",
            "put the tokenizer beside it that it was trained with",
        )
    ends = patient.end_token_ids = end_tokens_of(
        folder, tokenizer, section.model, trust_remote_code=section.trust_remote_code
    )
    texts = ", ".join(repr(text) for text in tokenizer.convert_ids_to_tokens(list(ends)))
    yield ok(f"{folder}: answers end at {texts}")


def load(patient: Patient) -> Iterator[Line]:
    """The weights, whole and all used; `itself` compares, so that one difference does not hide the others."""
    section = patient.recipe.target
    started = time.monotonic()
    patient.target = Target.of(section, patient.folder, prove=False)
    device = patient.target.device
    yield ok(f"{section.dtype} on {device}, in {time.monotonic() - started:.1f} s")


def itself(patient: Patient) -> Iterator[Line]:
    """The adapter against the model's own forward."""
    assert patient.target is not None
    for compared in comparisons(patient.target):
        if compared.holds:
            yield ok(f"{compared.name}: at most {compared.apart:.1g} off, {compared.limit:g} allowed")
        else:
            yield failure(
                f"{compared.name}: {compared.found}",
                f"peagle_train/target/families.py needs {compared.needed}",
            )


def rope(patient: Patient) -> Iterator[Line]:
    """The tables by which the target's full layers and the head turn."""
    assert patient.target is not None
    facts, section = patient.facts, patient.recipe.head
    wanted, dim = head_rope(section, facts), section.head_dim or facts.head_dim
    places = torch.tensor([place for place in _PLACES if place < facts.max_position_embeddings])
    theirs = turns_of(patient.target, places)
    ours = wanted.angles(places, dim)
    told = f"theta {wanted.theta:,g}, {wanted.rope_type}"
    if theirs[0].shape != ours[0].shape:
        yield ok(f"the head turns by {told}, in heads of {dim}; the target's full layers have others")
        return
    apart = max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True))
    if apart <= _SAME:
        yield ok(f"the head turns as the target does: {told}; tables at most {apart:.1g} apart")
    elif section.rope.rope_type == "target":
        yield failure(
            f"the head turns by {told}, but the target's table is up to {apart:.2g} away from that",
            "peagle_train/target/facts.py reads this class's RoPE wrongly; name the head's own in head.rope",
        )
    else:
        yield ok(f"the head turns by {told}, as head.rope says; the target turns otherwise")


def turns_of(target: Target, places: Tensor) -> tuple[Tensor, Tensor]:
    """cos and sin [N, D/2] by which the target's full layers turn at places [N], from its own code."""
    rotary = target.model.get_decoder().rotary_emb
    group = family_of(target.facts.class_name).rope_group
    states = torch.zeros(1, len(places), 1, dtype=torch.float32, device=target.device)
    ids = places.to(target.device)[None]
    cos, sin = rotary(states, ids, group) if group is not None else rotary(states, ids)
    cos, sin = cos[0].float().cpu(), sin[0].float().cpu()
    half = cos.shape[-1] // 2
    if torch.equal(cos[:, :half], cos[:, half:]):  # most classes write every angle twice
        cos, sin = cos[:, :half], sin[:, :half]
    return cos, sin
