"""The facts that vLLM looks for in several places of a config: RoPE, windows, aux layers, mask token.

Each function takes `seen`, the config as vLLM sees it, and writes its keys of `plain`, ours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from peagle_train.export.contract import AUX_KEY, MASK_KEYS
from peagle_train.export.faults import OWN_TARGET, brief, under
from peagle_train.foreign.findings import Findings
from peagle_train.head.config import FULL, SLIDING, Method
from peagle_train.target.facts import TargetFacts

# What transformers turns a config by that names no theta.
ROPE_THETA = 10000.0
# (sliding_window, max_window_layers) of a plain Qwen3 config that leaves them out.
QWEN3_WINDOW = (4096, 28)
# The mask token's keys in the order in which vLLM's proposer looks (v1/spec_decode/llm_base_proposer.py).
MASK_ORDER = ("dflash_config.mask_token_id", "mask_token_id", "dspark_noise_token_id", *MASK_KEYS)


def rope(seen: dict[str, Any], plain: dict[str, Any], findings: Findings) -> None:
    """transformers' order: `rope_scaling`, else `rope_parameters`; theta inside it, else beside it."""
    sections = [key for key in ("rope_scaling", "rope_parameters") if seen.get(key)]
    section = seen[sections[0]] if sections else {}
    if not isinstance(section, dict):
        plain["rope_theta"], plain["rope_scaling"] = seen.get("rope_theta", ROPE_THETA), section
        return
    section = {key: value for key, value in section.items() if (key, value) != ("partial_rotary_factor", 1.0)}
    inside = section.pop("rope_theta", None)
    theta = inside if inside is not None else seen.get("rope_theta")
    if theta is None:
        theta = ROPE_THETA
        findings.default("rope_theta", theta)
    plain["rope_theta"] = theta
    if section.get("rope_type", section.get("type", "default")) != "default" or len(section) > 1:
        plain["rope_scaling"] = section
    if len(sections) > 1:
        plain["rope_parameters"] = seen["rope_parameters"]  # the checks hold it against rope_scaling
    now = "rope_theta" + (" and rope_scaling" if "rope_scaling" in plain else "")
    for key in sections:
        if key == "rope_parameters" or inside is not None or seen[key] != plain.get("rope_scaling"):
            findings.change(key, brief(seen[key]), now)
        elif "rope_type" not in section:
            findings.change(f"{key}.type", brief(section.get("type")), f"{key}.rope_type")


def windows(seen: dict[str, Any], plain: dict[str, Any], wrapped: bool, findings: Findings) -> None:
    kinds, window, layers = seen.get("layer_types"), seen.get("sliding_window"), seen.get("num_hidden_layers")
    if not wrapped and seen.get("model_type") == "qwen3":  # transformers' rule for this class
        if seen.get("use_sliding_window") is not True:
            if isinstance(kinds, list) and SLIDING in kinds:
                findings.change("layer_types", brief(kinds), "none slides, without use_sliding_window")
            kinds = window = None
        elif kinds is None and type(layers) is int:
            window = seen.get("sliding_window", QWEN3_WINDOW[0])
            first = seen.get("max_window_layers", QWEN3_WINDOW[1])
            kinds = [SLIDING if window and i >= first else FULL for i in range(layers)]
    if isinstance(kinds, list) and type(layers) is int and len(kinds) > layers:
        findings.change("layer_types", f"{len(kinds)} kinds", f"the first {layers}, which vLLM reads")
        kinds = kinds[:layers]
    if kinds is None or (isinstance(kinds, list) and all(kind == FULL for kind in kinds)):
        if seen.get("sliding_window") is not None:
            now = "none, as no layer of vLLM's slides"
            findings.change("sliding_window", under(seen, "sliding_window"), now)
        if kinds:
            findings.change("layer_types", f"{len(kinds)} times {FULL}", "left out, which is the same")
        return
    plain["layer_types"], plain["sliding_window"] = kinds, window
    if plain.get("model_type") == "qwen3":
        plain["use_sliding_window"] = True


def aux(
    seen: dict[str, Any],
    plain: dict[str, Any],
    confirmed: Sequence[int] | None,
    target: TargetFacts,
    findings: Findings,
) -> None:
    found = _named_aux(seen, findings)
    layers: Any = found
    if found is None:
        if confirmed is None:
            default = [2, target.num_layers // 2, target.num_layers - 3]
            wanted = f"the layers the head was trained on; vLLM would take its default, {default} here"
            rising = default == sorted(set(default))
            shown = ",".join(map(str, default)) if rising else "I,J,K"
            cure = f"if the head's maker says so, name them: --aux-layers {shown}"
            findings.fault(AUX_KEY, "missing", wanted, cure)
            return
        layers = list(confirmed)
        findings.change(AUX_KEY, "left out", f"{layers}, as you said")
    elif confirmed is not None and list(confirmed) != sorted(_integers(found)):
        cure = f"leave --aux-layers out; {OWN_TARGET}"
        findings.fault(AUX_KEY, brief(found), f"{brief(list(confirmed))}, as --aux-layers says", cure)
    numbers = _integers(layers)
    if len(numbers) == len(layers) == len(set(numbers)) and numbers != sorted(numbers):
        findings.change(AUX_KEY, brief(layers), f"{sorted(numbers)}, the order in which vLLM taps them")
        layers = sorted(numbers)
    plain[AUX_KEY] = layers
    plain["eagle_config"] = {AUX_KEY: layers, "use_aux_hidden_state": True}
    plain["num_aux_hidden_states"] = len(layers)


def _named_aux(seen: dict[str, Any], findings: Findings) -> list[Any] | None:
    """The list as v1/worker/gpu_model_runner.py finds it."""
    layers = seen.get(AUX_KEY)
    if not layers:
        dflash, eagle = seen.get("dflash_config"), seen.get("eagle_config")
        place = f"eagle_config.{AUX_KEY}"
        if isinstance(dflash, dict) and isinstance(dflash.get("target_layer_ids"), list):
            layers = [layer + 1 for layer in _integers(dflash["target_layer_ids"])]
            place = "dflash_config.target_layer_ids"
        if isinstance(eagle, dict):
            layers, place = eagle.get(AUX_KEY), f"eagle_config.{AUX_KEY}"
        if layers and isinstance(layers, list):
            told = dflash["target_layer_ids"] if place.startswith("dflash") and dflash else layers
            findings.change(place, brief(told), f"{brief(layers)}, at the top level and in eagle_config")
    return list(layers) if layers and isinstance(layers, list) else None


def _integers(values: Sequence[Any]) -> list[int]:
    return [value for value in values if type(value) is int]


def method_of(seen: dict[str, Any], algorithm: Any, tensors: Collection[str], findings: Findings) -> Method:
    """peagle if the speculators format says so; in a plain one (algorithm None) if there is a placeholder
    state or a mask token."""
    if algorithm is None:
        parallel = "mask_hidden" in tensors or bool(_mask_tokens(seen))
        return "peagle" if parallel else "eagle3"
    if algorithm == "eagle3" and "mask_hidden" in tensors:
        wanted = "'peagle', since the head has a mask_hidden, which vLLM would leave unused"
        findings.fault("speculators_model_type", "'eagle3'", wanted)
    return "eagle3" if algorithm == "eagle3" else "peagle"


def _mask_tokens(seen: dict[str, Any]) -> dict[str, Any]:
    """Every mask token that is named, first the one vLLM takes."""
    nested = seen.get("dflash_config")
    values = {key: seen.get(key) for key in MASK_ORDER}
    if isinstance(nested, dict):
        values[MASK_ORDER[0]] = nested.get("mask_token_id")
    return {key: value for key, value in values.items() if value is not None}


def mask_token(seen: dict[str, Any], plain: dict[str, Any], wrapped: bool, findings: Findings) -> None:
    named = _mask_tokens(seen)
    if not named:
        wanted = f"the mask token's id under one of {', '.join(MASK_ORDER)}"
        cure = "ask the head's maker, and write it into config.json"
        findings.fault(" and ".join(MASK_KEYS), "missing", wanted, cure)
        return
    mask = next(iter(named.values()))
    if set(named) != set(MASK_KEYS):
        found = "mask_token_id" if wrapped and list(named) == [MASK_KEYS[0]] else " and ".join(named)
        findings.change(found, brief(mask), " and ".join(MASK_KEYS))
    plain.update(dict.fromkeys(MASK_KEYS, mask))
