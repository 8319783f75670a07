"""config.json of a foreign head in the words of our contract.

vLLM 0.32 finds one and the same fact in many places; each function below looks where vLLM looks, in its
order. Two formats give other defaults for what is left out:

    plain         transformers' Llama or Qwen3 config, by `model_type`; the class decides the drafter
    speculators   `transformer_layer_config` as it stands, and over it what the top level says
                  (transformers_utils/configs/speculators/algos.py)

Only what vLLM would have to guess from the target, the aux layers, is never filled in: the user names it.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from peagle_train.export.contract import ARCHITECTURES, AUX_KEY, COPIED_KEYS, FIXED_OPTIONS, OPTIONS
from peagle_train.export.faults import brief, under
from peagle_train.export.speculators import MODEL_CLASSES, is_wrapped
from peagle_train.foreign.findings import Findings
from peagle_train.foreign.keys import aux, mask_token, method_of, rope, windows
from peagle_train.foreign.places import INNER, one_value
from peagle_train.head.config import Drafter, Method
from peagle_train.target.facts import TargetFacts

# Further names in vLLM's registry (model_executor/models/registry.py) of the two drafters we have.
OTHER_CLASSES: dict[str, Drafter] = {
    "PEagleDraftModel": "llama",
    "PeagleLlamaForCausalLM": "llama",
    "Eagle3MiniMaxM2ForCausalLM": "llama",
    "Eagle3Qwen2_5vlForCausalLM": "llama",
    "Eagle3Qwen3vlForCausalLM": "llama",
    "PeagleQwen3ForCausalLM": "qwen3",
}
CLASSES: dict[str, Drafter] = {
    **{name: drafter for drafter, names in ARCHITECTURES.items() for name in names},
    **OTHER_CLASSES,
}
# What transformers gives a plain config that leaves the key out, by model_type.
PLAIN_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"rms_norm_eps": 1e-6},
    "qwen3": {"rms_norm_eps": 1e-6, "num_key_value_heads": 32, "head_dim": 128},
}
_SPECULATORS = "speculators_model_type"
_ONLY = "no other kind of head is known here"


def normalise_config(
    raw: dict[str, Any],
    *,
    tensors: Collection[str],
    aux_layers: Sequence[int] | None,
    target: TargetFacts,
    findings: Findings,
) -> tuple[dict[str, Any], Method]:
    """A plain config, still without `dtype`, for `export.config_checks` to judge; and how the head drafts.

    Args:
        raw: the object in config.json.
        tensors: names of the head's tensors, in our words.
        aux_layers: what the user says the head was trained on.
        target: the model it shall draft for.
        findings: takes what was changed and what is wrong.
    """
    wrapped = is_wrapped(raw)
    seen = _unwrapped(raw, target, findings) if wrapped else raw
    plain: dict[str, Any] = {}
    _class(raw, seen, plain, wrapped, findings)
    defaults = {} if wrapped else PLAIN_DEFAULTS.get(str(seen.get("model_type")), {})
    _sizes(seen, plain, defaults, target, findings)
    _options(seen, plain, wrapped, findings)
    rope(seen, plain, findings)
    windows(seen, plain, wrapped, findings)
    aux(seen, plain, aux_layers, target, findings)
    method = method_of(seen, raw.get(_SPECULATORS) if wrapped else None, tensors, findings)
    if method == "peagle":
        mask_token(seen, plain, wrapped, findings)
    one_value(raw, seen, plain, wrapped, findings)
    return plain, method


def speculative_tokens(raw: dict[str, Any]) -> int | None:
    """The K that a speculators config recommends, if it names one."""
    section = raw.get("speculators_config")
    methods = section.get("proposal_methods") if isinstance(section, dict) else None
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    return tokens if type(tokens) is int and tokens > 0 else None


def refuse_quantised(raw: dict[str, Any], findings: Findings) -> None:
    """Packed weights have other tensors altogether; nothing else need be said of such a head."""
    for place, section in (("", raw), (f"{INNER}.", raw.get(INNER))):
        if isinstance(section, dict):
            for key in ("quantization_config", "compression_config"):
                if section.get(key):
                    wanted = "none: packed weights can neither be proven nor trained"
                    findings.fault(
                        f"{place}{key}", "present", wanted, "fetch the head that was not quantised"
                    )


def _unwrapped(raw: dict[str, Any], target: TargetFacts, findings: Findings) -> dict[str, Any]:
    """What vLLM makes of a speculators config."""
    algorithm = raw.get(_SPECULATORS)
    if not isinstance(algorithm, str) or algorithm not in MODEL_CLASSES:
        wanted = " or ".join(repr(name) for name in MODEL_CLASSES)
        findings.fault(_SPECULATORS, under(raw, _SPECULATORS), wanted, _ONLY)
    if raw.get("model_type") is not None:
        wanted = "none at the top level: with it vLLM does not recognise the format"
        findings.fault("model_type", under(raw, "model_type"), wanted, "remove the key")
    inner = raw.get(INNER)
    if not isinstance(inner, dict):
        findings.fault(INNER, under(raw, INNER), "an object with the head's sizes")
        inner = {}
    serving = raw["speculators_config"]
    verifier = serving.get("verifier") if isinstance(serving, dict) else None
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if name is not None and name != target.model:
        findings.change("speculators_config.verifier", brief(name), target.model)
    seen = {"model_type": "llama", **inner, "draft_vocab_size": raw.get("draft_vocab_size")}
    for key in ("target_hidden_size", AUX_KEY):
        if raw.get(key):
            seen[key] = raw[key]
    seen["norm_before_residual"] = raw.get("norm_before_residual")
    seen["norm_before_fc"] = raw.get("norm_before_fc")
    if seen["norm_before_residual"] is None:
        seen["norm_before_residual"] = algorithm == "eagle3"
        findings.default("norm_before_residual", seen["norm_before_residual"])
    if algorithm == "eagle3":
        seen.update({key: raw.get(key) for key in ("fc_norm", "norm_output")})
    if raw.get("mask_token_id") is not None:
        seen["pard_token"] = raw["mask_token_id"]
    return seen


def _class(
    raw: dict[str, Any], seen: dict[str, Any], plain: dict[str, Any], wrapped: bool, findings: Findings
) -> None:
    """The drafter: by the class in a plain config, by the inner model_type in a speculators one."""
    kind, classes = seen.get("model_type"), raw.get("architectures")
    first = classes[0] if isinstance(classes, list) and classes else None
    plain.update(model_type=kind, architectures=classes)
    if not isinstance(kind, str) or kind not in ARCHITECTURES:
        known = " or ".join(repr(name) for name in ARCHITECTURES)
        findings.fault("model_type", under(seen, "model_type"), known, _ONLY)
        return
    drafter: Drafter = "qwen3" if kind == "qwen3" else "llama"
    if not wrapped:
        if not isinstance(first, str) or first not in CLASSES:
            wanted = f"one of {', '.join(CLASSES)}"
            findings.fault("architectures", under(raw, "architectures"), wanted, _ONLY)
            return
        drafter = CLASSES[first]
    name = ARCHITECTURES[drafter][0]
    plain.update(model_type=drafter, architectures=[name])
    if not wrapped and classes != [name]:
        findings.change("architectures", str(first) if classes == [first] else brief(classes), name)
    if kind != drafter:
        findings.change("model_type", kind, f"{drafter}, as its class computes")


def _sizes(
    seen: dict[str, Any],
    plain: dict[str, Any],
    defaults: dict[str, Any],
    target: TargetFacts,
    findings: Findings,
) -> None:
    for key in COPIED_KEYS:
        value = seen.get(key)
        if value is None:
            by_class = key not in seen and key in defaults
            value = defaults[key] if by_class else _implied(key, seen, target)
            if value is None:
                continue  # the checks say that it is missing
            findings.default(key, value)
        elif key == "max_position_embeddings" and type(value) is int:
            longest = target.max_position_embeddings
            if value < longest:  # vLLM does the same: config/speculative.py
                findings.change(key, str(value), f"{longest}, the target's, as vLLM raises it")
                value = longest
        plain[key] = value


def _implied(key: str, seen: dict[str, Any], target: TargetFacts) -> Any:
    """What vLLM takes for a size that is left out or null; None: it has nothing to take."""
    if key == "max_position_embeddings":
        return target.max_position_embeddings
    if key == "head_dim":
        hidden, heads = seen.get("hidden_size"), seen.get("num_attention_heads")
        if isinstance(hidden, int) and isinstance(heads, int) and heads > 0:
            return hidden // heads
        return None
    sources = {
        "num_key_value_heads": "num_attention_heads",
        "draft_vocab_size": "vocab_size",
        "target_hidden_size": "hidden_size",
    }
    return seen.get(sources[key]) if key in sources else None


def _options(seen: dict[str, Any], plain: dict[str, Any], wrapped: bool, findings: Findings) -> None:
    nested = seen.get("eagle_config")
    nested = nested if isinstance(nested, dict) else {}
    for key in OPTIONS:
        value = seen.get(key)
        if key == "norm_before_fc" and key in nested:
            value = nested[key]
        if value is None:
            value = False
            findings.default(key, value)
        plain[key] = value
    for key, only in FIXED_OPTIONS.items():
        value = seen.get(key)
        if value is None:
            findings.default(key, only)
        elif key == "tie_word_embeddings" and value is True:
            # vLLM's drafters do not tie: they load lm_head.weight, whatever this key says.
            findings.change(key, "true", "false, as the drafter has an lm_head of its own")
        else:
            plain[key] = value
            continue
        plain[key] = only
    if seen.get("bias") and not seen.get("attention_bias"):
        findings.fault("bias", under(seen, "bias"), "none: vLLM gives only the output projection a bias then")
    if seen.get("partial_rotary_factor") not in (None, 1, 1.0):
        key = "partial_rotary_factor"
        findings.fault(key, under(seen, key), "none: RoPE turns all channels of this head")
    if nested.get("use_aux_hidden_state", True) is not True:
        key = "use_aux_hidden_state"
        wanted = "true: a head that reads the last state alone is another kind of drafter (EAGLE 1)"
        findings.fault(f"eagle_config.{key}", under(nested, key), wanted)
