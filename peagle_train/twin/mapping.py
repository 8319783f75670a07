"""A recipe for the real target, turned into the rehearsal's: what is large or far becomes small and near.

Sizes, counts, steps and lengths shrink; GPUs, launchers, servers, trackers and networks are left out. What
decides whether the road is sound stays as the recipe has it: method, chat format, system prompt, template
variables, ways of asking, turns, kind of the mask token, RoPE kind, the head's arithmetic, COD, loss, export.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from peagle_train.recipe.data import PromptSet
from peagle_train.recipe.schema import Recipe
from peagle_train.twin.make import WINDOW, Original, Twin, twin_of

COUNTS = {"train": 24, "validation": 8}
HELDOUT = 4
PROMPT_TOKENS, NEW_TOKENS = 1024, 24
STEPS, HEAD_LAYERS = 30, 2
_LOCAL = ("stdlib", "humaneval")
_SMALL, _NEAR = "small", "no network"
_CPU = "a laptop"


class Change(NamedTuple):
    """A key that the rehearsal has otherwise, with the reason."""

    key: str
    value: Any
    why: str


class Prompts(NamedTuple):
    """A file of built-in prompts that the rehearsal reads: `rows` of them from the number `first` on."""

    path: Path
    rows: int
    first: int


class Rehearsal(NamedTuple):
    """twin: the model. values: the recipe, as its file holds it. changes: against the one it came from."""

    twin: Twin
    values: dict[str, Any]
    changes: list[tuple[Change, Any]]  # with the value it replaces
    prompts: list[Prompts]


def rehearsal_of(recipe: Recipe, original: Original, room: Path) -> Rehearsal:
    """The rehearsal of a recipe.

    Args:
        original: the target it stands for.
        room: folder where the twin (`target`) and the prompts will lie.
    """
    windows = _windows(recipe)
    twin = twin_of(recipe, original, windows)
    prompts: list[Prompts] = []
    values = recipe.model_dump(mode="json")
    changed = []
    for change in _changes(recipe, original, twin, windows, room, prompts):
        *above, last = change.key.split(".")
        section = values
        for part in above:
            section = section[part]
        before = section[last]
        if before != change.value:
            section[last] = change.value
            changed.append((change, before))
    return Rehearsal(twin, values, changed, prompts)


def _windows(recipe: Recipe) -> list[int | None]:
    """Of the rehearsed head's layers; a sliding one has the twins' window."""
    kinds = recipe.head.layer_types or ["full_attention"] * recipe.head.layers
    return [WINDOW if kind == "sliding_attention" else None for kind in kinds[:HEAD_LAYERS]]


def _changes(
    recipe: Recipe,
    original: Original,
    twin: Twin,
    windows: list[int | None],
    room: Path,
    prompts: list[Prompts],
) -> Iterator[Change]:
    yield Change("name", f"{recipe.name}-twin", "a run of its own")
    yield Change("target.model", str(room / "target"), f"random, {original.class_name}")
    yield Change("target.revision", None, "a folder has none")
    for key, value in (("dtype", "float32"), ("device", "cpu"), ("parallel", "none")):
        yield Change(f"target.{key}", value, _CPU)
    yield Change("target.trust_remote_code", False, "its code is ours")
    yield from _data(recipe, twin, room, prompts)
    yield Change("states.dtype", "float32", "as the twin")
    yield Change("states.backend", "hf", "no vLLM here")
    yield Change("states.url", None, _NEAR)
    yield Change("states.batch_tokens", min(recipe.states.batch_tokens, 2048), _SMALL)
    yield from _head(recipe, original, twin, windows)
    yield from _training(recipe)
    yield Change("evaluate.loop_prompts", min(recipe.evaluate.loop_prompts, 2), _SMALL)
    yield Change("push.to", None, _NEAR)


def _data(recipe: Recipe, twin: Twin, room: Path, prompts: list[Prompts]) -> Iterator[Change]:
    data = recipe.data
    sets = [("train", data.train, COUNTS["train"]), ("validation", data.validation, COUNTS["validation"])]
    sets += [(f"heldout.{name}", section, HELDOUT) for name, section in data.heldout.items()]
    for key, section, most in sets:
        yield Change(f"data.{key}.count", min(section.count or most, most), _SMALL)
        if all(_is_local(part.source) for part in section.parts):
            continue
        yield from _built_in(f"data.{key}", section, most, room / "prompts" / key, prompts)
    near = [name for name in data.decontaminate if _is_local(name)]
    yield Change("data.decontaminate", near, _NEAR)
    yield Change("data.server", None, "the twin answers in process")
    template = twin.shape.template
    known = _read_by(template, data.template_variables)
    yield Change("data.template_variables", known, "what the twin's template reads")
    asked = [way.model_dump(mode="json") for way in data.sampling]
    for way in asked:
        way["template_variables"] = _read_by(template, way["template_variables"])
    yield Change("data.sampling", asked, "what the twin's template reads")
    if "strftime_now" not in template:
        yield Change("data.date", None, "the twin's template writes no date")
    yield Change("data.min_prompt_tokens", 0, "the twin's tokens are letters")
    yield Change(
        "data.max_prompt_tokens", PROMPT_TOKENS + len(data.system_prompt or ""), "its tokens are letters"
    )
    yield Change("data.max_new_tokens", min(data.max_new_tokens, NEW_TOKENS), _SMALL)
    yield Change("data.batch_size", min(data.batch_size, 8), _SMALL)
    yield Change("data.workers", 1, _CPU)


def _built_in(
    key: str, section: PromptSet, count: int, stem: Path, prompts: list[Prompts]
) -> Iterator[Change]:
    """The parts of a set that lie elsewhere, replaced by files of built-in prompts."""
    parts = []
    for number, part in enumerate(section.parts):
        values = part.model_dump(mode="json")
        if not _is_local(part.source):
            file = stem.with_name(f"{stem.name}-{number}.jsonl")
            prompts.append(Prompts(file, count, 1000 * (len(prompts) + 1)))
            values |= {"source": str(file), "subset": None, "part": None, "revision": None}
            values |= {"columns": {}, "roles": {}}
        parts.append(values)
    if section.mix is not None:
        yield Change(f"{key}.mix", parts, _NEAR)
    else:
        for name in ("source", "subset", "part", "revision", "columns", "roles"):
            yield Change(f"{key}.{name}", parts[0][name], _NEAR)
    if not any(_is_local(part.source) for part in section.parts):
        yield Change(f"{key}.split", "all", "a file of its own")


def _is_local(source: str) -> bool:
    """Whether a source is on this machine: a built-in one, or a path; a bare word is a preset of the Hub."""
    if source in _LOCAL:
        return True
    if source.startswith("hub:") or "://" in source:
        return False
    return Path(source).exists() or "/" in source or "*" in source or bool(Path(source).suffix)


def _read_by(template: str, variables: dict[str, Any]) -> dict[str, Any]:
    return {name: v for name, v in variables.items() if re.search(rf"\b{re.escape(name)}\b", template)}


def _head(recipe: Recipe, original: Original, twin: Twin, windows: list[int | None]) -> Iterator[Change]:
    head = recipe.head
    yield Change("head.layers", len(windows), _SMALL)
    layers = aux_layers_of(head.aux_layers, original.num_layers, twin.layers)
    yield Change("head.aux_layers", layers, f"by the same rule, {twin.layers} layers")
    if not _has_token(twin, head.mask_token):
        yield Change("head.mask_token", twin.shape.mask, "of the same kind")
    if head.draft_vocab_size is not None:
        share = round(head.draft_vocab_size / original.vocab_size * twin.rows)
        size = min(max(64, share), twin.rows - 1)
        yield Change("head.draft_vocab_size", size, f"of {twin.rows} rows")
    if head.hidden_size is not None:
        width = max(32, round(head.hidden_size / original.hidden_size * twin.hidden / 32) * 32)
        yield Change("head.hidden_size", width, _SMALL)
    for key in ("intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim"):
        yield Change(f"head.{key}", None, "the twin's")
    yield Change("head.max_position_embeddings", None, "the twin's")
    if head.layer_types is not None:
        yield Change("head.layer_types", head.layer_types[: len(windows)], _SMALL)
        window = WINDOW if any(w is not None for w in windows) else None
        yield Change("head.sliding_window", window, "the twin's")
    yield Change("head.start_from", None, "it is a head of the real target")


def _has_token(twin: Twin, mask_token: int | str | None) -> bool:
    """Whether the recipe's mask token means something to the twin's tokenizer."""
    if mask_token is None or mask_token in ("unused", twin.shape.mask):
        return True
    return isinstance(mask_token, str) and mask_token in twin.shape.build(twin.rows).get_vocab()


def _training(recipe: Recipe) -> Iterator[Change]:
    train = recipe.train
    steps = min(train.steps, STEPS)
    yield Change("train.steps", steps, _SMALL)
    yield Change("train.batch_tokens", min(train.batch_tokens, 512), _SMALL)
    yield Change("train.accumulate", min(train.accumulate, 2), _SMALL)
    yield Change("train.warmup_steps", min(train.warmup_steps, steps // 10), _SMALL)
    for key in ("log_every", "validate_every", "checkpoint_every"):
        yield Change(f"train.{key}", min(getattr(train, key), steps // 2 or 1), _SMALL)
    if train.backend in ("flash", "flex"):
        yield Change("train.backend", "auto", _CPU)
    yield Change("train.precision", "fp32", _CPU)
    for key in ("memory", "launch"):
        yield Change(f"train.{key}", None, _CPU)
    yield Change("track.log_with", [], _NEAR)
    yield Change("track.entity", None, _NEAR)


def aux_layers_of(layers: list[int], depth: int, twin_depth: int) -> list[int]:
    """Where a twin of `twin_depth` layers is tapped, by the rule that gave `layers` of a target of `depth`.

    Layers near an end keep their distance from it, others their share of the depth: 2, 12, 21 of 24 are
    2, 4, 5 of 8, both by vLLM's rule 2, L // 2, L - 3.
    """
    mapped: list[int] = []
    for layer in layers:
        if layer <= 3:
            place = layer
        elif depth - layer <= 4:
            place = twin_depth - (depth - layer)
        else:
            place = layer * twin_depth // depth
        mapped.append(max(place, mapped[-1] + 1 if mapped else 0))
    for index in range(len(mapped) - 1, -1, -1):  # pushed up by their neighbours, they must still be layers
        mapped[index] = min(mapped[index], twin_depth - (len(mapped) - 1 - index))
    return mapped
