"""Training that goes on from a head: `head.start_from` names its directory.

The directory is one of ours (`peagle export` or `peagle import` wrote it). Its head must be the one the
recipe describes, to the last option: a recipe that says otherwise would describe another head than the one
that is trained. The draft vocabulary is the head's own: chosen anew, it would renumber the rows of `lm_head`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from peagle_train.errors import PeagleError, RecipeError
from peagle_train.export.contract import CONFIG_FILE, RECORD_FILE, WEIGHTS_FILE
from peagle_train.export.layout import read_head
from peagle_train.files import read_json, sha256_of
from peagle_train.head.config import HeadConfig
from peagle_train.head.model import DrafterHead
from peagle_train.recipe.checks import head_rope
from peagle_train.recipe.schema import HeadSection

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


def recorded_config(directory: Path) -> HeadConfig:
    """The config that export.json records; of a head that we did not write there is none."""
    path = directory / RECORD_FILE
    if not path.is_file():
        raise PeagleError(
            f"{directory}: found no {RECORD_FILE}; expected a head that `peagle export` or "
            f"`peagle import` wrote; for a head of another maker: peagle import {directory} --target RECIPE "
            "--out DIR"
        )
    try:
        return HeadConfig.from_dict(read_json(path)["head"])
    except (KeyError, TypeError, ValueError) as error:
        raise PeagleError(
            f"{path}: found no config of a head ({error}); expected the record of "
            "`peagle export`; export or import the head again"
        ) from error


def start_parts(section: HeadSection) -> dict[str, Any]:
    """What the output of training depends on beside the recipe: the head's content, not only its path."""
    if section.start_from is None:
        return {}
    directory = Path(section.start_from)
    recorded_config(directory)
    return {"start_from": {name: sha256_of(directory / name) for name in (CONFIG_FILE, WEIGHTS_FILE)}}


def differences(head: HeadConfig, wanted: HeadConfig, directory: Path) -> Iterator[tuple[str, str]]:
    """Key of the recipe, and what stands there against what the head has."""
    for name in (field.name for field in fields(HeadConfig)):
        if getattr(head, name) == getattr(wanted, name):
            continue
        mine, theirs = _written(wanted, name), _written(head, name)
        if name in _KEYS:
            key = f"head.{_KEYS[name]}"
            yield key, f"found {mine}; expected {theirs} as in {directory}; write {key}={_override(theirs)}"
        else:
            yield (
                "head.start_from",
                f"found a head with {name} {theirs}; expected {mine}; it is one of another target or method",
            )


def refuse_another(wanted: HeadConfig, head: HeadConfig, directory: Path) -> None:
    """Raises RecipeError with everything in which the head is another than the recipe's."""
    found = [f"{key}: {message}" for key, message in differences(head, wanted, directory)]
    if found:
        raise RecipeError(f"head.start_from: {directory}", found)


def read_start(directory: Path, embeddings: Tensor) -> DrafterHead:
    """The head to go on from, in float32; it is proven first.

    Args:
        embeddings: [V, H] the target's table, for a head that shares it.
    """
    recorded_config(directory)
    return read_head(directory, shared_embeddings=embeddings.cpu()).float()


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


def _as_written(rope: Any) -> dict[str, Any]:
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
