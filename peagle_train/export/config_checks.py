"""Checks of config.json: every key vLLM reads is there, well typed, and agrees with head and target."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from peagle_train.export.contract import (
    ARCHITECTURES,
    AUX_KEY,
    COPIED_KEYS,
    DTYPES,
    FIXED_OPTIONS,
    LAYER_KINDS,
    MASK_KEYS,
    OPTIONS,
    head_config,
)
from peagle_train.export.faults import AGAIN, OWN_TARGET, REMOVE_KEY, brief, fault, under
from peagle_train.head.config import SLIDING, HeadConfig, Method
from peagle_train.head.rope import Rope

# vLLM looks at these before `pard_token`; one that is present must not name another token.
OTHER_MASK_KEYS = ("mask_token_id", "dspark_noise_token_id")
# Bounds on what is believed of a stranger's file before anything is counted by it.
LARGEST = 2**31
MOST_LAYERS = 1024


def check_config(
    config: dict[str, Any],
    *,
    method: Method,
    facts: dict[str, Any],
    trained: dict[str, Any],
    wrapped: bool,
) -> tuple[HeadConfig | None, str | None, list[str]]:
    """Reads a plain config, or the one inside a speculators config.

    Args:
        config: the object.
        method: how the head drafts, which decides whether it names a mask token.
        facts: num_layers, hidden_size, vocab_size, max_position_embeddings of the target; may be empty.
        trained: the HeadConfig that export.json recorded, as a dict; may be empty.
        wrapped: whether the config stood inside a speculators config, whose outer key names the class.

    Returns:
        The head's config if all sizes could be read, its dtype if known, and the faults.
        `own_embeddings` is left False: the tensors decide it.
    """
    faults: list[str] = []
    sound = _check_numbers(config, faults)
    sound &= _check_class(config, wrapped, faults)
    sound &= _check_aux_layers(config, facts, faults)
    sound &= _check_mask_token(config, method, faults)
    # What no tensor's shape hangs on is left out where it is faulty, so that the tensors are still checked.
    usable = dict(config)
    for check, neutral in (
        (_check_options, {key: config.get(key) is True for key in OPTIONS}),
        (_check_rope, {"rope_theta": 1.0, "rope_scaling": None}),
        (_check_windows, {"layer_types": None, "sliding_window": None}),
    ):
        if not check(config, faults):
            usable |= neutral
    dtype = _check_dtype(config, faults)
    if not sound:
        return None, dtype, faults
    head = head_config(usable, method=method, own_embeddings=False)
    _check_sizes_against_each_other(head, faults)
    _check_against_target(head, facts, faults)
    if usable == config:
        _check_against_training(head, trained, faults)
    return head, dtype, faults


def _check_numbers(config: dict[str, Any], faults: list[str]) -> bool:
    before = len(faults)
    for key in COPIED_KEYS:
        value: Any = config.get(key)
        if key == "rms_norm_eps":
            good, wanted = _positive(value), "a positive number"
        else:
            largest = MOST_LAYERS if key == "num_hidden_layers" else LARGEST - 1
            good = type(value) is int and 1 <= value <= largest
            wanted = f"a whole number from 1 to {largest}"
        if not good:
            faults.append(fault(key, under(config, key), wanted + _guessed(value), AGAIN))
    return len(faults) == before


def _guessed(value: Any) -> str:
    """vLLM guesses only what is not there."""
    return ", which vLLM would guess" if value is None else ""


def _positive(value: Any) -> bool:
    return type(value) in (int, float) and 0 < value < LARGEST  # false for NaN too


def _check_class(config: dict[str, Any], wrapped: bool, faults: list[str]) -> bool:
    drafter = config.get("model_type")
    known = " or ".join(repr(name) for name in ARCHITECTURES)
    if not isinstance(drafter, str) or drafter not in ARCHITECTURES:
        wanted = f"{known}, the drafters vLLM has"
        faults.append(fault("model_type", under(config, "model_type"), wanted))
        return False
    allowed = ARCHITECTURES[drafter]
    classes = config.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else None
    if not wrapped and first not in allowed:
        wanted = f"[{allowed[0]!r}], since vLLM knows no other P-EAGLE name in a plain config of {drafter!r}"
        faults.append(fault("architectures", under(config, "architectures"), wanted))
    return True


def _check_options(config: dict[str, Any], faults: list[str]) -> bool:
    for key, expected in FIXED_OPTIONS.items():
        value = config.get(key)
        if value != expected or isinstance(value, bool) != isinstance(expected, bool):
            wanted = f"{expected!r}, the only one that heads here compute"
            faults.append(fault(key, under(config, key), wanted))
    sound = True
    for key in OPTIONS:
        if not isinstance(config.get(key), bool):
            wanted = "true or false" + (", since vLLM would assume one" if config.get(key) is None else "")
            faults.append(fault(key, under(config, key), wanted))
            sound = False
    nested = config.get("eagle_config")
    key = "norm_before_fc"
    if isinstance(nested, dict) and nested.get(key, config.get(key)) != config.get(key):
        wanted = f"{under(config, key)} as at the top level: vLLM takes this one first"
        faults.append(fault(f"eagle_config.{key}", under(nested, key), wanted, REMOVE_KEY))
    return sound


def _check_aux_layers(config: dict[str, Any], facts: dict[str, Any], faults: list[str]) -> bool:
    layers = config.get(AUX_KEY)
    if not isinstance(layers, list) or not layers or any(type(layer) is not int for layer in layers):
        wanted = "a list of layer ids, without which vLLM takes its own default"
        faults.append(fault(AUX_KEY, under(config, AUX_KEY), wanted))
        return False
    if layers != sorted(set(layers)):
        wanted = f"{brief(sorted(set(layers)))}: rising, without repeats, as vLLM sorts them"
        faults.append(fault(AUX_KEY, brief(layers), wanted, "train with the sorted list"))
    depth = facts.get("num_layers")
    beyond = [layer for layer in layers if layer < 0 or (depth is not None and layer > depth)]
    if beyond:
        wanted = "ids of 0 or more" if depth is None else f"0..{depth}, since the target has {depth} layers"
        faults.append(fault(AUX_KEY, f"{brief(beyond)} out of range", wanted, OWN_TARGET))
    key = "num_aux_hidden_states"
    if type(config.get(key)) is not int or config[key] != len(layers):
        wanted = f"{len(layers)}, the length of {AUX_KEY}, by which vLLM sizes fc"
        faults.append(fault(key, under(config, key), wanted))
    key = "num_aux_layers"  # the Qwen3 drafter looks here first
    if config.get(key) not in (None, len(layers)):
        faults.append(fault(key, under(config, key), f"none, or {len(layers)}", REMOVE_KEY))
    section = config.get("eagle_config")
    inner = section if isinstance(section, dict) else {}
    if inner.get(AUX_KEY) != layers:
        wanted = f"{brief(layers)} as at the top level"
        faults.append(fault(f"eagle_config.{AUX_KEY}", under(inner, AUX_KEY), wanted))
    if inner.get("use_aux_hidden_state", True) is not True:
        key = "use_aux_hidden_state"
        faults.append(fault(f"eagle_config.{key}", under(inner, key), "true"))
    return True


def _check_mask_token(config: dict[str, Any], method: Method, faults: list[str]) -> bool:
    if method == "eagle3":
        for key in (*MASK_KEYS, *OTHER_MASK_KEYS):
            if config.get(key) is not None:
                wanted = "none: an eagle3 head drafts one token after the other"
                faults.append(fault(key, under(config, key), wanted, REMOVE_KEY))
        return True
    values = [config.get(key) for key in MASK_KEYS]
    mask: Any = values[0]
    if any(type(value) is not int or value != mask for value in values):
        found = "missing" if values == [None] * len(values) else brief(values)
        wanted = "the mask token's id, twice the same"
        faults.append(fault(" and ".join(MASK_KEYS), found, wanted))
        return False
    vocabulary = config.get("vocab_size")
    if mask < 0 or (type(vocabulary) is int and mask >= vocabulary):
        wanted = f"an id below vocab_size {brief(vocabulary)}: vLLM would read past its table without a word"
        faults.append(fault(MASK_KEYS[0], brief(mask), wanted, "train with another mask token"))
    others = {key: config.get(key) for key in OTHER_MASK_KEYS}
    nested = config.get("dflash_config")
    if isinstance(nested, dict):
        others["dflash_config.mask_token_id"] = nested.get("mask_token_id")
    for key, value in others.items():
        if value is not None and value != mask:
            wanted = f"none, or {mask} as in {MASK_KEYS[0]}: vLLM takes {key} first"
            faults.append(fault(key, brief(value), wanted, REMOVE_KEY))
    return True


def _check_rope(config: dict[str, Any], faults: list[str]) -> bool:
    """rope_theta and rope_scaling say what the head turns by; nothing else may say it differently."""
    theta, scaling = config.get("rope_theta"), config.get("rope_scaling")
    if not _positive(theta):
        wanted = "a positive number" + _guessed(theta)
        faults.append(fault("rope_theta", under(config, "rope_theta"), wanted))
        return False
    assert isinstance(theta, (int, float))
    try:
        rope = Rope.from_parameters(theta, scaling)
    except (ValueError, TypeError, AttributeError) as error:
        wanted = "a RoPE that vLLM's drafters and this head compute alike"
        faults.append(fault("rope_scaling", f"{brief(scaling)} ({error})", wanted, "restore the value"))
        return False
    newer = config.get("rope_parameters")
    if newer not in (None, {}):
        try:
            same = Rope.from_parameters(newer.get("rope_theta", theta), newer) == rope
        except (ValueError, TypeError, AttributeError):
            same = False
        if not same:
            wanted = f"none, or the same as rope_theta {brief(theta)} and rope_scaling"
            faults.append(fault("rope_parameters", brief(newer), wanted, REMOVE_KEY))
    longest = config.get("max_position_embeddings")
    if type(longest) is int and longest > rope.reach:
        wanted = (
            f"at most {rope.reach:g} = factor x original_max_position_embeddings: vLLM has no table beyond"
        )
        faults.append(fault("max_position_embeddings", str(longest), wanted, "train with a larger factor"))
    return True


def _check_windows(config: dict[str, Any], faults: list[str]) -> bool:
    before = len(faults)
    kinds, window = config.get("layer_types"), config.get("sliding_window")
    layers = config.get("num_hidden_layers")
    if kinds is not None:
        known = isinstance(kinds, list) and all(kind in LAYER_KINDS for kind in kinds)
        if not known or len(kinds) != layers:
            wanted = f"{brief(layers)} times {' or '.join(LAYER_KINDS)}"
            faults.append(fault("layer_types", brief(kinds), wanted))
            return False
    slides = kinds is not None and SLIDING in kinds
    if slides and not (type(window) is int and 0 < window < LARGEST):
        wanted = "a whole number: layer_types has sliding layers"
        faults.append(fault("sliding_window", under(config, "sliding_window"), wanted))
    if not slides and window is not None:
        wanted = "none: no layer of layer_types slides"
        faults.append(fault("sliding_window", under(config, "sliding_window"), wanted, REMOVE_KEY))
    key = "use_sliding_window"
    if slides and config.get("model_type") == "qwen3" and config.get(key) is not True:
        wanted = "true: without it transformers drops the window of a Qwen3 config"
        faults.append(fault(key, under(config, key), wanted))
    return len(faults) == before


def _check_dtype(config: dict[str, Any], faults: list[str]) -> str | None:
    dtype = config.get("dtype", config.get("torch_dtype"))
    if isinstance(dtype, str) and dtype in DTYPES:
        return dtype
    faults.append(fault("dtype", brief(dtype), f"one of {', '.join(DTYPES)}"))
    return None


def _check_sizes_against_each_other(head: HeadConfig, faults: list[str]) -> None:
    if head.num_attention_heads % head.num_key_value_heads:
        wanted = f"a divisor of num_attention_heads {head.num_attention_heads}"
        faults.append(fault("num_key_value_heads", str(head.num_key_value_heads), wanted))
    if head.head_dim % 2:
        faults.append(fault("head_dim", str(head.head_dim), "an even number, for RoPE"))
    if head.draft_vocab_size > head.vocab_size:
        wanted = f"at most vocab_size {head.vocab_size}"
        faults.append(fault("draft_vocab_size", str(head.draft_vocab_size), wanted))


def _check_against_target(head: HeadConfig, facts: dict[str, Any], faults: list[str]) -> None:
    for key, fact in (("vocab_size", "vocab_size"), ("target_hidden_size", "hidden_size")):
        now, expected = getattr(head, key), facts.get(fact)
        if expected is not None and now != expected:
            faults.append(fault(key, str(now), f"{expected}, the target's {fact}", OWN_TARGET))
    key = "max_position_embeddings"
    context = facts.get(key)
    if context is not None and head.max_position_embeddings < context:
        wanted = f"at least the target's {context}, beyond which vLLM stops drafting or crashes"
        faults.append(fault(key, str(head.max_position_embeddings), wanted, f"set head.{key} and {AGAIN}"))


def _check_against_training(head: HeadConfig, trained: dict[str, Any], faults: list[str]) -> None:
    """config.json against the config the head was trained with, as export.json recorded it."""
    keys = {field: key for key, field in COPIED_KEYS.items()}
    keys |= {"aux_layers": AUX_KEY, "mask_token_id": MASK_KEYS[0], "drafter": "model_type"}
    keys |= {"layer_types": "layer_types", "sliding_window": "sliding_window"}
    keys |= {option: option for option in OPTIONS}
    for field, key in keys.items():
        now = getattr(head, field)
        now = list(now) if isinstance(now, tuple) else now
        if field in trained and trained[field] != now:
            _changed(key, now, trained[field], faults)
    rope = trained.get("rope")
    if isinstance(rope, dict):
        for field, now in asdict(head.rope).items():
            key = "rope_theta" if field == "theta" else f"rope_scaling.{field}"
            if field in rope and rope[field] != now:
                _changed(key, now, rope[field], faults)


def _changed(key: str, now: Any, trained: Any, faults: list[str]) -> None:
    wanted = f"{brief(trained)}, with which the head was trained (export.json)"
    faults.append(fault(key, brief(now), wanted, f"restore the value or {AGAIN}"))
