"""The text of a first recipe: (key and value, where the value comes from), line by line."""

from __future__ import annotations

import datetime
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from peagle_train.recipe.head import head_rope
from peagle_train.recipe.schema import HeadSection, TargetSection
from peagle_train.target.facts import KVLayer, TargetFacts
from peagle_train.target.families import family_of
from peagle_train.target.kv_groups import needs_flag

LAYERS, POSITIONS, LENGTH = 4, 8, 8192  # arXiv 2602.01469

DRAFTED = 32_000
"""Draft vocabulary of a target with a larger one, as most published EAGLE-3 heads have it."""

WIDE = 6
"""MLP of a head over its width where the target's own MLPs are experts, as published heads have it."""

Lines = Iterator[tuple[str, str]]


@dataclass(frozen=True)
class MaskToken:
    """What `head.mask_token` shall say; value None: a line that the user must fill in. about: a comment."""

    value: str | None
    about: str


def recipe_text(
    name: str,
    target: TargetSection,
    facts: TargetFacts,
    mask: MaskToken,
    tokenizer: Any = None,
    launch: Path | None = None,
) -> str:
    """The whole file. tokenizer: for its chat template, if it is at hand."""
    head = [
        f"# A P-EAGLE head for {target.model}, written by `peagle init` from the model's config.",
        "# Every value is a start, and its comment says where it comes from: [paper] is arXiv 2602.01469.",
        f"# What it costs: peagle plan {name}. What can be wrong: peagle doctor {name}. Keys: peagle recipe.",
    ]
    lines = [
        *_target(name, target),
        *_data(facts, tokenizer),
        *_head(facts, mask),
        *_train(facts, launch),
    ]
    return "\n".join([*head, *(_line(*line) for line in lines), ""])


def quoted(text: str) -> str:
    """A text as YAML wants it: plain where that is safe."""
    return text if re.fullmatch(r"[A-Za-z0-9./_-]*[A-Za-z/_-][A-Za-z0-9./_-]*", text) else f'"{text}"'


def context_of(facts: TargetFacts) -> int:
    """Tokens of the longest row."""
    return min(LENGTH, facts.max_position_embeddings)


def _target(name: str, target: TargetSection) -> Lines:
    yield f"name: {name}", ""
    yield "", ""
    yield "target:", ""
    yield f"  model: {quoted(target.model)}", ""
    if target.revision is not None:
        yield f"  revision: {quoted(target.revision)}", ""
    yield "  dtype: bfloat16", ""
    yield "", ""


def _data(facts: TargetFacts, tokenizer: Any) -> Lines:
    length = context_of(facts)
    prompt = max(length // 8, 1)
    yield "data:", ""
    yield "  train:", ""
    yield "    mix:", "[paper] its sources; the weights are our reasoning; prompts of your own are better"
    for source, weight in (("ultrachat", 10), ("opencodeinstruct", 9), ("gsm8k", 1)):
        yield f"      - {{source: {source}, weight: {weight}}}", ""
    yield "    split: train", ""
    yield "    count: 50000", "our reasoning: a quarter of UltraChat-200k, enough for a first head"
    yield "  validation: {source: ultrachat, split: validation, count: 200}", ""
    yield "  heldout:", ""
    yield "    humaneval: {source: humaneval, count: 164}", ""
    yield "    mt-bench: {source: mt-bench, count: 80}", ""
    yield "  decontaminate: [humaneval, mt-bench]", ""
    yield f"  max_prompt_tokens: {prompt}", ""
    yield f"  max_new_tokens: {length - prompt}", f"with the prompt {length:,}: [paper] 8,192, or the context"
    if _writes_the_day(tokenizer):
        yield f'  date: "{datetime.date.today().isoformat()}"', "its chat template writes the day"
    yield "  # server: {url: http://localhost:8000/v1}", "a vLLM that answers, many times as fast"
    yield "", ""


def _head(facts: TargetFacts, mask: MaskToken) -> Lines:
    depth, layers = facts.num_layers, min(LAYERS, facts.num_layers)
    yield "head:", ""
    yield f"  layers: {layers}", "[paper] 4"
    if depth > 7:
        yield (
            f"  aux_layers: [2, {depth // 2}, {depth - 3}]",
            f"vLLM's default 2, L // 2, L - 3 of L = {depth}",
        )
    else:
        aux = sorted({1, max(depth // 2, 1), depth})
        yield f"  aux_layers: {aux}", "our reasoning: vLLM's default rule repeats layers below L = 8"
    if family_of(facts.class_name).experts:
        yield (
            f"  intermediate_size: {WIDE * facts.hidden_size}",
            f"published heads: {WIDE} x hidden; the target's {facts.intermediate_size:,} is of experts",
        )
    yield from _rope(facts)
    yield from _windows(facts, layers)
    yield f"  mask_token: {'' if mask.value is None else quoted(mask.value)}", mask.about
    if facts.vocab_size > 2 * DRAFTED:
        yield (
            f"  draft_vocab_size: {DRAFTED}",
            f"of {facts.vocab_size:,}, as published EAGLE-3 heads; left out: all, which cost memory",
        )
    yield "", ""


def _rope(facts: TargetFacts) -> Lines:
    try:
        rope = head_rope(HeadSection(aux_layers=[1]), facts)
    except ValueError:
        kind = (facts.rope_scaling or {}).get("rope_type")
        yield "  rope: {rope_type: default}", f"the target turns by {kind}, which no drafter of vLLM has"
        return
    if rope.reach < facts.max_position_embeddings:
        yield (
            "  rope: {rope_type: default}",
            f"the target's yarn reaches {rope.reach:,g} of its {facts.max_position_embeddings:,} positions",
        )
        return
    yield "  rope: {rope_type: target}", f"{rope.rope_type}, theta {rope.theta:,g}"


def _windows(facts: TargetFacts, layers: int) -> Lines:
    """Nothing where full layers can be served; else layers with the target's window."""
    full = [KVLayer(None, facts.num_key_value_heads, facts.head_dim)] * layers
    try:
        flag = needs_flag(full, facts.kv_layers)
    except ValueError:
        window = next(layer.window for layer in facts.kv_layers if layer.window is not None)
        yield f"  layer_types: [{', '.join(['sliding_attention'] * layers)}]", ""
        yield f"  sliding_window: {window}", "vLLM gives every layer this target's window"
        return
    if flag:
        yield "  # served with --disable-hybrid-kv-cache-manager; fewer layers may do without", ""


def _train(facts: TargetFacts, launch: Path | None) -> Lines:
    yield "train:", ""
    yield f"  positions: {POSITIONS}", "[paper] 8; at least the K of serving"
    yield "  cod: {rate: 0.8}", "[paper]"
    yield "  steps: 10000", "our reasoning; `peagle plan` tells epochs and hours"
    yield f"  batch_tokens: {context_of(facts)}", "a row of the greatest length"
    yield "  learning_rate: 1.0e-4", "[paper]; lower it where the loss jumps"
    yield "  warmup_steps: 25", "[paper] 0.25 % of the steps"
    yield "  validate_every: 500", ""
    yield "  checkpoint_every: 500", ""
    if launch is not None:
        yield f"  launch: {launch}", "the first of recipes/accelerate whose process fits a GPU of 80 GB"
    yield "", ""
    yield "evaluate:", ""
    yield "  k: 5", "[paper] the K of its tables"


def _writes_the_day(tokenizer: Any) -> bool:
    template = getattr(tokenizer, "chat_template", None) or ""
    text = template if isinstance(template, str) else "\n".join(template.values())
    return "strftime_now" in text or "date_string" in text


def _line(value: str, comment: str) -> str:
    return f"{value:<33} # {comment}" if comment else value
