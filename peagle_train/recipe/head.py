"""Between the `head` section of a recipe and the head it describes, both ways.

`head_config` reads a recipe, `head_section` writes one, `differences` holds a head against a recipe in the
recipe's own keys. Both directions stand here so that a new option is one line in each, side by side.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle_train.head.config import HeadConfig
from peagle_train.head.rope import Rope
from peagle_train.recipe.schema import HeadSection, Recipe

if TYPE_CHECKING:
    from peagle_train.target.facts import TargetFacts

# Field of HeadConfig -> key of the recipe's `head`. The others are the target's, or follow from these.
_KEYS: dict[str, str] = {
    "num_layers": "layers",
    "mask_token_id": "mask_token",
    "own_embeddings": "embeddings",
    **{
        name: name
        for name in (
            "aux_layers",
            "draft_vocab_size",
            "drafter",
            "hidden_size",
            "intermediate_size",
            "num_attention_heads",
            "num_key_value_heads",
            "head_dim",
            "rope",
            "layer_types",
            "sliding_window",
            "norm_before_residual",
            "norm_before_fc",
            "fc_norm",
            "norm_output",
            "attention_bias",
            "rms_norm_eps",
            "max_position_embeddings",
        )
    },
}


def head_config(
    recipe: Recipe, facts: TargetFacts, mask_token_id: int | None, draft_vocab_size: int
) -> HeadConfig:
    """The head's sizes: the recipe's where it names them, else the target's."""
    section = recipe.head
    return HeadConfig(
        hidden_size=section.hidden_size or facts.hidden_size,
        intermediate_size=section.intermediate_size or facts.intermediate_size,
        num_layers=section.layers,
        num_attention_heads=section.num_attention_heads or facts.num_attention_heads,
        num_key_value_heads=section.num_key_value_heads or facts.num_key_value_heads,
        head_dim=section.head_dim or facts.head_dim,
        vocab_size=facts.vocab_size,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=facts.hidden_size,
        aux_layers=tuple(section.aux_layers),
        mask_token_id=mask_token_id,
        rms_norm_eps=section.rms_norm_eps or facts.rms_norm_eps,
        rope=head_rope(section, facts),
        max_position_embeddings=section.max_position_embeddings or facts.max_position_embeddings,
        own_embeddings=section.embeddings == "own",
        drafter=section.drafter,
        norm_before_residual=section.norm_before_residual,
        norm_before_fc=section.norm_before_fc,
        fc_norm=section.fc_norm,
        norm_output=section.norm_output,
        attention_bias=section.attention_bias,
        layer_types=tuple(section.layer_types or ()) if section.sliding_window else (),
        sliding_window=section.sliding_window,
        method=recipe.method,
    )


def head_rope(head: HeadSection, facts: TargetFacts) -> Rope:
    """The RoPE that a recipe asks for; what it leaves out is the target's.

    Raises ValueError for a kind, or keys of it, that no drafter has.
    """
    asked = head.rope.model_dump(exclude_none=True)
    theta = asked.pop("rope_theta", facts.rope_theta)
    if asked["rope_type"] == "target":
        extra = [key for key in asked if key != "rope_type"]
        if extra:
            raise ValueError(f"{', '.join(extra)} beside rope_type target, which takes all from the target")
        asked = dict(facts.rope_scaling or {})
    return Rope.from_parameters(theta, asked)


def head_section(config: HeadConfig, facts: TargetFacts, start_from: str) -> dict[str, Any]:
    """The `head` section of a recipe that describes this head; what needs no saying is left out."""
    section: dict[str, Any] = {"start_from": start_from}
    plain = HeadSection(aux_layers=[1], mask_token=0)
    for field, key in _KEYS.items():
        value = _written(config, field)
        implied = getattr(plain, key, None)
        if implied is None and key not in ("layer_types", "sliding_window"):
            implied = facts.vocab_size if key == "draft_vocab_size" else getattr(facts, key, None)
        if key == "rope":
            implied = _rope_of(plain, facts)
        told = key in ("layers", "aux_layers", "embeddings") or (key == "mask_token" and value is not None)
        if told or (key != "mask_token" and value != implied):
            section[key] = value
    return section


def differences(head: HeadConfig, wanted: HeadConfig, directory: Path) -> Iterator[tuple[str, str]]:
    """Key of the recipe, and what stands there against what the head has."""
    for name in (field.name for field in fields(HeadConfig)):
        if getattr(head, name) == getattr(wanted, name):
            continue
        if name == "mask_token_id" and head.method != wanted.method:
            continue  # follows from the method, which is told
        mine, theirs = _written(wanted, name), _written(head, name)
        if name in _KEYS:
            key = f"head.{_KEYS[name]}"
            override = shlex.quote(f"{key}={_override(theirs)}")
            yield key, f"found {mine}; expected {theirs} as in {directory}; write {override}"
        else:
            yield (
                "head.start_from",
                f"found a head with {name} {theirs}; expected {mine}; it is one of another target or method",
            )


def _written(config: HeadConfig, field: str) -> Any:
    """A field as the recipe writes it."""
    value = getattr(config, field)
    if field == "own_embeddings":
        return "own" if value else "shared"
    if field == "rope":
        return _as_written(value)
    if field == "layer_types":
        return list(value) or None
    return list(value) if isinstance(value, tuple) else value


def _rope_of(section: HeadSection, facts: TargetFacts) -> dict[str, Any] | None:
    """What the recipe's default means; None where the target turns as no drafter can."""
    try:
        return _as_written(head_rope(section, facts))
    except ValueError:
        return None


def _as_written(rope: Rope) -> dict[str, Any]:
    return {"rope_type": rope.rope_type, "rope_theta": rope.theta, **rope.scaling}


def _override(value: Any) -> str:
    """A value as KEY=VALUE takes it: YAML in one line."""
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_override(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_override, value)) + "]"
    if isinstance(value, bool):
        return str(value).lower()
    return "" if value is None else str(value)
