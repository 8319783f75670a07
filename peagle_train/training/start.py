"""What stands before step 0: mask token (peagle), draft vocabulary, sizes and first weights of the head."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import Tensor, nn

from peagle_train.errors import PeagleError
from peagle_train.files import atomic_file
from peagle_train.head.initialise import initialise_from_target, initialise_randomly
from peagle_train.head.model import DrafterHead
from peagle_train.head.vocabulary import choose_draft_vocabulary, count_supervised
from peagle_train.recipe.head import head_config
from peagle_train.recipe.schema import Recipe
from peagle_train.store.rows import cut_row
from peagle_train.store.source import StatesSource
from peagle_train.target.facts import TargetFacts
from peagle_train.target.mask_token import resolve_mask_token
from peagle_train.target.parts import TargetParts
from peagle_train.tensors import load_tensors, save_tensors
from peagle_train.training.warm_start import read_start, refuse_another

MEAN_ROWS = 512
"""Rows whose states give the mean state that mask slots start from: a mean needs no terabytes."""

LEAST_COVERAGE = 0.9
"""Below this share of draftable validation tokens the user is warned."""


@dataclass(frozen=True)
class Start:
    """A fresh head and the part of the target that training keeps."""

    head: DrafterHead
    target_output: nn.Module


def make_start(
    recipe: Recipe,
    target: TargetParts,
    store: StatesSource,
    rows: list[int],
    directory: Path,
    console: Console,
) -> Start:
    """Builds the head of a run.

    Args:
        target: on the CPU, as the head is at first.
        rows: the training rows; their tokens choose the draft vocabulary and their states the mean.
        directory: the training folder; the vocabulary map is written there once and read ever after.
    """
    counts, mean_aux = _survey(store, rows, target.facts.vocab_size)
    mask_token_id = mask_token_of(recipe, target.facts, target.tokenizer, target.end_token_ids, store)
    if recipe.head.start_from is not None:
        source = Path(recipe.head.start_from)
        start = _going_on(recipe, target, store, counts, mask_token_id, source, console)
    else:
        start = _fresh(recipe, target, store, counts, mean_aux, mask_token_id, directory, console)
    start.head.lm_head.weight.requires_grad_(recipe.head.output == "trained")
    return start


def _fresh(
    recipe: Recipe,
    target: TargetParts,
    store: StatesSource,
    counts: Tensor,
    mean_aux: Tensor,
    mask_token_id: int | None,
    directory: Path,
    console: Console,
) -> Start:
    """A head whose first weights come from the target, or from chance."""
    section = recipe.head
    token_ids = _draft_tokens(recipe, target, counts, mask_token_id, directory, console)
    _report_coverage(store, token_ids, target.facts.vocab_size, int((counts > 0).sum()), console)
    head = DrafterHead(head_config(recipe, target.facts, mask_token_id, token_ids.shape[0]))
    if head.config.reduced_vocabulary:
        head.set_draft_tokens(token_ids)

    embeddings = target.embedding_table()
    if section.initialise == "random":
        initialise_randomly(head, embeddings, recipe.seed)
    else:
        if target.facts.num_layers < section.layers:
            raise PeagleError(
                f"head.layers: {section.layers} layers cannot start from a target of "
                f"{target.facts.num_layers}; use fewer, or `initialise: random`"
            )
        left = initialise_from_target(
            head,
            embeddings=embeddings,
            output_rows=target.head_table()[token_ids],
            final_norm=target.final_norm_weight(),
            layers=target.last_layers(section.layers),
            mean_aux=mean_aux,
            seed=recipe.seed,
        )
        if left:
            console.print(
                f"random at the start, for want of a fitting tensor in the target: {', '.join(left)}"
            )
    return Start(head, target.output_head(token_ids))


def mask_token_of(
    recipe: Recipe, facts: TargetFacts, tokenizer: Any, end_token_ids: Sequence[int], store: StatesSource
) -> int | None:
    """The id of the recipe's mask token; None for a method without one.

    No row of any set may hold it: held-out text is text a server will see. Raises PeagleError if one does.
    """
    if recipe.head.mask_token is None:
        return None
    used = set(torch.cat([store.token_ids(info.row) for info in store.info()]).unique().tolist())
    return resolve_mask_token(recipe.head.mask_token, tokenizer, facts.vocab_size, used, end_token_ids)


def _going_on(
    recipe: Recipe,
    target: TargetParts,
    store: StatesSource,
    counts: Tensor,
    mask_token_id: int | None,
    directory: Path,
    console: Console,
) -> Start:
    """A head of a directory, with its own draft vocabulary, instead of a fresh one."""
    head = read_start(directory, target.embedding_table())
    size = recipe.head.draft_vocab_size or target.facts.vocab_size
    refuse_another(head_config(recipe, target.facts, mask_token_id, size), head.config, directory)
    console.print(f"going on from the head in {directory}", markup=False, highlight=False)
    token_ids = head.draft_token_ids
    _report_coverage(store, token_ids, target.facts.vocab_size, int((counts > 0).sum()), console)
    return Start(head, target.output_head(token_ids))


def _survey(store: StatesSource, rows: list[int], vocab_size: int) -> tuple[Tensor, Tensor]:
    """Supervised counts [V] of all rows, and the mean aux state [A*TH] of some."""
    counts = count_supervised(((store.token_ids(row), store.loss_mask(row)) for row in rows), vocab_size)
    total, tokens = torch.zeros((), dtype=torch.float64), 0
    some = rows[:: -(-len(rows) // MEAN_ROWS)]
    store.upcoming(some)
    for index in some:
        row = cut_row(store.read(index))  # the same rows of states, whether they are stored or made
        states = row.aux[row.prompt_length - 1 :]
        total = total + states.double().sum(0)
        tokens += states.shape[0]
    return counts, (total / tokens).float()


def _report_coverage(
    store: StatesSource, token_ids: Tensor, vocab_size: int, seen: int, console: Console
) -> None:
    """Says how much of the validation answers, which did not choose the vocabulary, can be drafted.

    seen: distinct tokens of the training answers; what they do not hold no size of vocabulary can choose.
    """
    rows = [info.row for info in store.info("validation")]
    answers = ((store.token_ids(row), store.loss_mask(row)) for row in rows)
    counts = count_supervised(answers, vocab_size)
    share = float(counts[token_ids].sum() / counts.sum())
    console.print(f"of the validation answers {100 * share:.1f} % of the tokens can be drafted")
    if share < LEAST_COVERAGE:
        cure = f"raise head.draft_vocab_size (now {token_ids.shape[0]:,})"
        if seen < token_ids.shape[0]:
            cure = f"train on more data: its answers hold {seen:,} distinct tokens"
        console.print(
            f"warning: every token that cannot be drafted ends a draft; {cure}",
            style="yellow",
            highlight=False,
        )


def _draft_tokens(
    recipe: Recipe,
    target: TargetParts,
    counts: Tensor,
    mask_token_id: int | None,
    directory: Path,
    console: Console,
) -> Tensor:
    """[DV] target ids the head can draft: read if chosen before, else chosen and written."""
    size = recipe.head.draft_vocab_size
    if size is None or size == target.facts.vocab_size:
        return torch.arange(target.facts.vocab_size)
    path = directory / "draft_vocabulary.safetensors"
    if path.is_file():
        return load_tensors(path)["token_ids"]
    never = [] if mask_token_id is None else [mask_token_id]
    try:
        chosen = choose_draft_vocabulary(counts, size, always=target.end_token_ids, never=never)
    except ValueError as error:
        raise PeagleError(f"head.draft_vocab_size: {error}; change it in the recipe") from error
    console.print(
        f"draft vocabulary: {size:,} of {target.facts.vocab_size:,} tokens; the training answers use "
        f"{chosen.seen:,} and {100 * chosen.coverage:.2f} % of their tokens can be drafted"
    )
    with atomic_file(path) as temporary:
        save_tensors(temporary, {"token_ids": chosen.token_ids})
    return chosen.token_ids
