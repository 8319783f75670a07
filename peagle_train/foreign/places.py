"""One fact, one value: what stands in several places of a config.json must be the same in all of them.

A fact of a head can stand at the top level, in `eagle_config`, `dflash_config`, `rope_scaling` and
`rope_parameters`, and all of these once more inside `transformer_layer_config`; some facts have several
names. vLLM takes the first place it looks at, or its default, and is silent about the others. Here each
place is collected under the fact it states, and every one that says other than what was taken is a fault.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from peagle_train.export.contract import AUX_KEY, COPIED_KEYS, FIXED_OPTIONS, MASK_KEYS, OPTIONS
from peagle_train.export.faults import brief
from peagle_train.foreign.findings import Findings
from peagle_train.head.config import FULL

INNER = "transformer_layer_config"
COUNT = "num_aux_hidden_states"
_MASK = MASK_KEYS[0]
_KIND = "speculators_model_type"
_ROPE = ("rope_scaling", "rope_parameters")
_SECTIONS = ("", "eagle_config", "dflash_config", *_ROPE)
# Other names of a fact.
_NAMES = {
    "torch_dtype": "dtype",
    "num_aux_layers": COUNT,
    **dict.fromkeys(("mask_token_id", "dspark_noise_token_id", *MASK_KEYS), _MASK),
}
# What is compared at the top level and in eagle_config. A drafter has an lm_head of its own whatever
# tie_word_embeddings says, so that key states nothing of a head.
_FACTS = {
    *COPIED_KEYS,
    *OPTIONS,
    *(FIXED_OPTIONS.keys() - {"tie_word_embeddings"}),
    *_NAMES,
    *("dtype", AUX_KEY, COUNT, "use_aux_hidden_state"),
    *("rope_theta", "partial_rotary_factor", "original_max_position_embeddings"),
    *("layer_types", "sliding_window", "use_sliding_window", "max_window_layers"),
}
# Where vLLM looks in eagle_config; the rest of it is read by no one.
_READ_IN_EAGLE = ("norm_before_fc", "use_aux_hidden_state", AUX_KEY)
# Facts that decide nothing by themselves: their places are held against each other only.
_BESIDE = {"dtype", _KIND, "use_sliding_window", "max_window_layers", "original_max_position_embeddings"}
# What is taken where nothing is read.
_NEUTRAL = {"rope_type": "default", "partial_rotary_factor": 1.0, "use_aux_hidden_state": True}
_CURE = "ask the head's maker which one is right"


def one_value(
    raw: dict[str, Any], seen: dict[str, Any], plain: dict[str, Any], wrapped: bool, findings: Findings
) -> None:
    """A fault for every place of `raw` that says other than what was taken into `plain`.

    Args:
        raw: the object in config.json.
        seen: the config as vLLM sees it.
        plain: the same in our words, complete.
        wrapped: whether raw is in the speculators format.
    """
    nested = seen.get("eagle_config")
    if isinstance(nested, dict):
        seen = {**seen, "eagle_config": {key: nested[key] for key in nested if key in _READ_IN_EAGLE}}
    read = _stated(seen, wrapped=False)
    for fact, places in _stated(raw, wrapped).items():
        ours = _taken(fact, plain)
        values = list((places if fact in _BESIDE else read.get(fact, {})).values())
        if ours is not None and (fact == COUNT or any(_same(ours, value) for value in values)):
            taken = ours
        elif values:
            taken = values[0]
        elif fact == COUNT:  # without a list of layers the counts have only each other
            taken = next(iter(places.values()))
        else:
            taken = _NEUTRAL.get(fact) if ours is None else ours
        named = next((place for place, value in places.items() if _same(value, taken)), None)
        for place, value in places.items():
            if not _same(value, taken):
                reason = f"as in {named}" if named else "which vLLM takes without looking there"
                wanted = f"{brief(taken)} {reason}: two values for one fact"
                findings.fault(place, brief(value), wanted, _CURE)
    if any(f"{_ROPE[1]}." in line for line in findings.faults):
        plain.pop(_ROPE[1], None)  # told already; the checks need not say it of the whole section


def _stated(config: dict[str, Any], wrapped: bool) -> dict[str, dict[str, Any]]:
    """fact -> place -> value, for every place that says anything."""
    stated: dict[str, dict[str, Any]] = {}
    inner = config.get(INNER)
    levels = [("", config)] + ([(f"{INNER}.", inner)] if wrapped and isinstance(inner, dict) else [])
    for prefix, level in levels:
        for name in _SECTIONS:
            section = level.get(name) if name else level
            if isinstance(section, dict):
                where = f"{prefix}{name}." if name else prefix
                for key, fact, value in _facts(name, section):
                    stated.setdefault(fact, {})[f"{where}{key}"] = value
    serving = config.get("speculators_config")
    if wrapped and isinstance(serving, dict) and serving.get("algorithm") is not None:
        stated[_KIND] = {_KIND: config.get(_KIND), "speculators_config.algorithm": serving["algorithm"]}
    return stated


def _facts(name: str, section: dict[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Key, fact and comparable value of what a section states; null and empty say nothing."""
    for key, value in section.items():
        if value is None or value == [] or value == {}:
            continue
        fact: str | None = _NAMES.get(key, key)
        if name in _ROPE:
            fact = "rope_type" if key == "type" else key
        elif name == "dflash_config":
            fact = {"mask_token_id": _MASK, "target_layer_ids": AUX_KEY}.get(key)
        elif key not in _FACTS:
            fact = None
        if fact is not None:
            yield key, fact, _comparable(key, fact, value)


def _comparable(key: str, fact: str, value: Any) -> Any:
    if fact == "dtype" and isinstance(value, str):
        return value.removeprefix("torch.")
    if fact == AUX_KEY and isinstance(value, list) and all(type(layer) is int for layer in value):
        return sorted(layer + (key == "target_layer_ids") for layer in value)  # vLLM's dflash ids: one less
    return value


def _taken(fact: str, plain: dict[str, Any]) -> Any:
    """What our words say of a fact; None: nothing."""
    if fact == COUNT:
        layers = plain.get(AUX_KEY)
        return len(layers) if isinstance(layers, list) else None
    scaling = plain.get("rope_scaling")
    if fact not in plain and isinstance(scaling, dict):
        return scaling.get("type") if fact == "rope_type" and fact not in scaling else scaling.get(fact)
    return plain.get(fact)


def _same(left: Any, right: Any) -> bool:
    """Equal, and true is not 1. Layers that all see everything are those of a head without a list."""
    if right is None and isinstance(left, list):
        return all(kind == FULL for kind in left)
    return isinstance(left, bool) == isinstance(right, bool) and bool(left == right)
