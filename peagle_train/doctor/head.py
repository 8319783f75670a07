"""The head: its mask token, what it can draft, and whether vLLM can serve it beside its target."""

from __future__ import annotations

from collections.abc import Iterator

import torch

from peagle_train.doctor.patient import Line, Patient, ok, warning
from peagle_train.export.serving import serving_flags
from peagle_train.head.vocabulary import choose_draft_vocabulary, count_supervised
from peagle_train.recipe.head import head_config
from peagle_train.store import AnswerStore
from peagle_train.store.answers import INDEX
from peagle_train.target.kv_groups import FLAG
from peagle_train.target.mask_token import resolve_mask_token
from peagle_train.training.start import LEAST_COVERAGE

_ENOUGH_TOKENS = 2000  # supervised tokens below which a coverage is a guess


def serving(patient: Patient) -> Iterator[Line]:
    """KV cache groups, and the flags that follow from them."""
    recipe, facts = patient.recipe, patient.facts
    mask = 0 if recipe.method == "peagle" else None
    head = head_config(recipe, facts, mask, recipe.head.draft_vocab_size or facts.vocab_size)
    if serving_flags(head, facts.kv_layers):
        yield warning(
            f"vLLM cannot give the head's {head.num_layers} layers one KV cache group beside the target's; "
            f"it serves them with {FLAG}, which costs the memory that sliding layers save",
            "change head.layers to keep the saving",
        )
    else:
        yield ok(f"the head's {head.num_layers} layers share one KV cache group beside the target's")
    if recipe.evaluate.k == recipe.train.positions:
        yield ok(f"K = {recipe.evaluate.k}, all the positions that are trained")
    else:
        yield ok(f"K = {recipe.evaluate.k} of {recipe.train.positions} trained positions")


def mask_token(patient: Patient) -> Iterator[Line]:
    """The id that the recipe's mask token means, by tokenizer and template alone."""
    recipe = patient.recipe
    patient.mask_token_id = None
    if recipe.head.mask_token is None:
        yield ok("eagle3 has none")
        return
    asked = {token for row in getattr(patient, "asked", []) for token in row.token_ids}
    found = resolve_mask_token(
        recipe.head.mask_token, patient.tokenizer, patient.facts.vocab_size, asked, patient.end_token_ids
    )
    patient.mask_token_id = found
    text = patient.tokenizer.convert_ids_to_tokens(found)
    meaning = "a row without a token" if text is None else f"the token {text!r}"
    yield ok(f"id {found}, {meaning}; in none of the prompts looked at")


def mask_token_unused(patient: Patient) -> Iterator[Line]:
    """The same against what the target said."""
    if patient.mask_token_id is None:
        yield ok("eagle3 has none")
        return
    used = {token for row in patient.rows for token in row.token_ids}
    spec, vocab_size = patient.recipe.head.mask_token, patient.facts.vocab_size
    assert spec is not None
    found = resolve_mask_token(spec, patient.tokenizer, vocab_size, used, patient.end_token_ids)
    if found != patient.mask_token_id:  # `unused` goes on to the next row
        yield warning(
            f"the target says id {patient.mask_token_id}, for which its tokenizer has no text; id {found} "
            "is free",
            "a trained model does not do that: is it the tokenizer that belongs to these weights?",
        )
    else:
        yield ok(f"id {found} stands in none of {len(patient.rows)} rows")


def vocabulary(patient: Patient) -> Iterator[Line]:
    """How much of unseen answers can be drafted: those of the run if there are some, else the handful."""
    size, rows, whose = patient.recipe.head.draft_vocab_size, patient.rows, "the answers made just now"
    vocab_size = patient.facts.vocab_size
    if size is None or size == vocab_size:
        yield ok(f"all {vocab_size:,} tokens can be drafted")
        return
    from peagle_train.run import FOLDERS, run_directory

    answers = run_directory(patient.recipe) / FOLDERS["prepare"]
    if (answers / INDEX).is_file():
        rows, whose = AnswerStore(answers).rows(), f"the answers in {answers}"
    counts = {
        name: count_supervised(
            (
                (torch.tensor(row.token_ids), torch.tensor(row.loss_mask))
                for row in rows
                if (row.set == "train") is (name == "train")
            ),
            vocab_size,
        )
        for name in ("train", "others")
    }
    never = [] if patient.mask_token_id is None else [patient.mask_token_id]
    chosen = choose_draft_vocabulary(counts["train"], size, always=patient.end_token_ids, never=never)
    total = int(counts["others"].sum())
    share = float(counts["others"][chosen.token_ids].sum()) / max(total, 1)
    text = (
        f"{size:,} of {vocab_size:,} tokens: {100 * share:.1f} % of {total:,} tokens that did not choose "
        f"them, in {whose}, can be drafted"
    )
    if share >= LEAST_COVERAGE:
        yield ok(text)
    elif int(counts["train"].sum()) < _ENOUGH_TOKENS:
        few = int(counts["train"].sum())
        yield warning(f"{text}, chosen by {few:,} tokens only", "ask again when `peagle prepare` is done")
    else:
        yield warning(text, "raise head.draft_vocab_size: every token that cannot be drafted ends a draft")
