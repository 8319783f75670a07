"""What only the target can refuse in a recipe, found from its config alone, before any weight is read."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from peagle_train.errors import PeagleError, RecipeError
from peagle_train.recipe.load import Places
from peagle_train.recipe.schema import Recipe
from peagle_train.target.facts import KVLayer
from peagle_train.target.kv_groups import needs_flag

if TYPE_CHECKING:
    from peagle_train.target.source import TargetFacts


def check_against_target(
    recipe: Recipe, facts: TargetFacts, source: str, places: Places | None = None
) -> None:
    """Raises RecipeError with everything in `recipe` that this target makes impossible.

    Args:
        recipe: valid in itself.
        facts: the target's sizes, read from its config.
        source: the recipe's path, for the messages.
        places: where the values were written; with it the messages name lines.
    """
    known = places or Places(source)
    faults = sorted(_faults(recipe, facts), key=lambda fault: known.rank(fault[0]))
    if faults:
        raise RecipeError(source, [f"{known.of(key)}: {key}: {message}" for key, message in faults])


def _faults(recipe: Recipe, facts: TargetFacts) -> Iterator[tuple[str, str]]:
    head, data = recipe.head, recipe.data
    model = facts.model
    too_deep = [layer for layer in head.aux_layers if layer > facts.num_layers]
    if too_deep:
        depth = facts.num_layers
        default = [2, depth // 2, depth - 3] if depth > 7 else None  # below, vLLM's own rule repeats layers
        yield (
            "head.aux_layers",
            f"found {', '.join(map(str, too_deep))}; expected at most {depth}, because {model} has {depth} "
            "decoder layers" + (f"; vLLM's default for it is {default}" if default else ""),
        )
    if head.draft_vocab_size is not None and head.draft_vocab_size > facts.vocab_size:
        yield (
            "head.draft_vocab_size",
            f"found {head.draft_vocab_size}; expected at most {facts.vocab_size}, the vocabulary of {model}; "
            "leave it out for the whole vocabulary",
        )
    if isinstance(head.mask_token, int) and head.mask_token >= facts.vocab_size:
        yield (
            "head.mask_token",
            f"found id {head.mask_token}; expected less than {facts.vocab_size}, because {model} has no such "
            "row and vLLM does not notice; name an unused token, or write `unused` to find one",
        )
    longest = head.max_position_embeddings
    if longest is not None and longest < facts.max_position_embeddings:
        yield (
            "head.max_position_embeddings",
            f"found {longest}; expected at least the {facts.max_position_embeddings} of {model}, because the "
            "server drafts up to the target's full context; leave it out to take the target's",
        )
    if head.initialise == "target" and head.start_from is None and head.layers > facts.num_layers:
        yield (
            "head.layers",
            f"found {head.layers}; expected at most the {facts.num_layers} of {model}, whose last layers the "
            "head starts from; use fewer, or `initialise: random`",
        )
    if head.start_from is not None:
        yield from _start_faults(recipe, facts, head.start_from)
    hidden = head.hidden_size or facts.hidden_size
    if head.embeddings == "shared" and hidden != facts.hidden_size:
        yield (
            "head.hidden_size",
            f"found {hidden}; expected {facts.hidden_size}, the width of the table of {model} that the head "
            "shares; write `embeddings: own`, or leave hidden_size out",
        )
    if head.output == "frozen" and head.start_from is None and hidden != facts.hidden_size:
        yield (
            "head.output",
            f"found frozen in a head of width {hidden}; expected trained, because the output rows of {model} "
            f"are {facts.hidden_size} wide and cannot be copied; write `output: trained`, or leave "
            "hidden_size out",
        )
    from peagle_train.recipe.head import head_rope  # here, because it imports torch

    try:
        rope = head_rope(head, facts)
    except ValueError as error:
        yield (
            "head.rope",
            f"found {error}; expected a RoPE that vLLM's drafters compute: default, linear, llama3 or yarn "
            "with their keys. A head's RoPE need not be its target's: `rope: {rope_type: default}` is plain "
            "RoPE",
        )
    else:
        needed = head.max_position_embeddings or facts.max_position_embeddings
        if needed > rope.reach:
            yield (
                "head.rope",
                f"found yarn with factor x original_max_position_embeddings = {rope.reach:g}; expected at "
                f"least {needed}, the longest context: vLLM has no table beyond; raise the factor",
            )
    heads = head.num_attention_heads or facts.num_attention_heads
    kv_heads = head.num_key_value_heads or facts.num_key_value_heads
    if heads % kv_heads:
        key = "head.num_key_value_heads" if head.num_key_value_heads else "head.num_attention_heads"
        yield (
            key,
            f"found {heads} query heads for {kv_heads} key-value heads (what the recipe leaves out is the "
            "target's); expected a multiple, because query heads share key-value heads in equal groups",
        )
    head_dim = head.head_dim or facts.head_dim
    kinds = head.layer_types or ["full_attention"] * head.layers
    windows = [head.sliding_window if kind == "sliding_attention" else None for kind in kinds]
    try:
        needs_flag([KVLayer(window, kv_heads, head_dim) for window in windows], facts.kv_layers)
    except ValueError as error:
        yield (
            "head.sliding_window",
            f"found {error}; expected a head that vLLM serves as it is trained; change head.layer_types and "
            "head.sliding_window, to the target's window if it has one",
        )
    if head_dim % 2:
        yield (
            "head.head_dim",
            f"found {head_dim}; expected an even number, because RoPE turns pairs of channels",
        )
    tokens = data.max_prompt_tokens + data.max_new_tokens
    if tokens > facts.max_position_embeddings:
        yield (
            "data.max_new_tokens",
            f"found {data.max_prompt_tokens} prompt + {data.max_new_tokens} new tokens = {tokens}; expected "
            f"at most {facts.max_position_embeddings}, the context of {model}; lower one of the two",
        )


def _start_faults(recipe: Recipe, facts: TargetFacts, start_from: str) -> Iterator[tuple[str, str]]:
    """In what the head that training shall go on from differs from the one the recipe describes."""
    from peagle_train.head.io import recorded_config
    from peagle_train.recipe.head import differences, head_config

    head = recipe.head
    try:
        recorded = recorded_config(Path(start_from))
        # A token named by its text is known only with the tokenizer, when training starts.
        named = head.mask_token if isinstance(head.mask_token, int) else recorded.mask_token_id or 0
        mask = named if recipe.method == "peagle" else None
        wanted = head_config(recipe, facts, mask, head.draft_vocab_size or facts.vocab_size)
    except PeagleError as error:
        yield "head.start_from", str(error)
    except ValueError:
        return  # the RoPE or the windows are faulty: that is told elsewhere
    else:
        yield from differences(recorded, wanted, Path(start_from))
