"""The speculators format: `vllm serve HEAD` alone finds the target, the method and K.

Source: vLLM 0.32, transformers_utils/configs/speculators/{base,algos}.py. vLLM takes the format by the key
`speculators_config` when the top level names no `model_type`; it then uses `transformer_layer_config` as it
stands, without the defaults of a Llama config, and adds to it what it finds at the top level:

    {"speculators_model_type": "peagle" | "eagle3", "mask_token_id": 3 (peagle), "draft_vocab_size": ..., ...,
     "transformer_layer_config": { the plain config },
     "speculators_config": {"proposal_methods": [{"speculative_tokens": K, ...}],
                            "verifier": {"name_or_path": TARGET, ...}}}

The tensors are the same in both formats.
"""

from __future__ import annotations

from typing import Any

from peagle_train.export.contract import method_of
from peagle_train.export.faults import brief, fault, under
from peagle_train.head.config import Method

# The format's name of each method is also vLLM's name for what it does with the head.
MODEL_CLASSES: dict[Method, str] = {"peagle": "PEagleDraftModel", "eagle3": "Eagle3DraftModel"}
# Repeated at the top level because vLLM reads them there and overwrites the inner ones, with a default of its
# own if they are missing.
MIRRORED_KEYS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "eagle_aux_hidden_state_layer_ids",
)


def wrap(
    plain: dict[str, Any],
    *,
    method: Method,
    target: str,
    target_class: str,
    speculative_tokens: int,
    writer: str,
) -> dict[str, Any]:
    """A plain config as speculators config. `target` is the folder or Hub id that vLLM shall load."""
    mask = {"mask_token_id": plain["pard_token"]} if method == "peagle" else {}
    return {
        "architectures": [MODEL_CLASSES[method]],
        "speculators_model_type": method,
        "written_by": writer,
        "dtype": plain["dtype"],
        **mask,
        **{key: plain[key] for key in MIRRORED_KEYS},
        "transformer_layer_config": plain,
        "speculators_config": {
            "algorithm": method,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": speculative_tokens}],
            "verifier": {"name_or_path": target, "architectures": [target_class]},
        },
    }


def is_wrapped(config: dict[str, Any]) -> bool:
    """Whether config.json is in the speculators format, by vLLM's own test."""
    return config.get("speculators_config") is not None


def unwrap(config: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """The plain config inside, as vLLM will see it, and the faults of the wrapping."""
    faults: list[str] = []
    if "model_type" in config:
        wanted = "none at the top level: with it vLLM does not recognise the format"
        faults.append(fault("model_type", under(config, "model_type"), wanted, "remove the key"))
    key = "transformer_layer_config"
    inner = config.get(key)
    if not isinstance(inner, dict):
        faults.append(fault(key, under(config, key), "an object with the head's sizes"))
        inner = {}
    method = method_of(inner)
    key = "speculators_model_type"
    if config.get(key) != method:
        reason = "a" if method == "peagle" else "no"
        wanted = f"{method!r}, since transformer_layer_config has {reason} mask token"
        faults.append(fault(key, under(config, key), wanted))
    faults += _serving_faults(config["speculators_config"])
    for key in (*MIRRORED_KEYS, *(("mask_token_id",) if method == "peagle" else ())):
        inner_key = "pard_token" if key == "mask_token_id" else key
        if key not in config or config[key] != inner.get(inner_key):
            wanted = f"{under(inner, inner_key)} as in transformer_layer_config.{inner_key}"
            faults.append(fault(key, under(config, key), wanted))
    seen = inner | {key: config[key] for key in MIRRORED_KEYS if key in config}
    return seen, faults


def _serving_faults(section: Any) -> list[str]:
    where = "speculators_config"
    if not isinstance(section, dict):
        return [fault(where, brief(section), "an object")]
    faults = []
    methods = section.get("proposal_methods")
    first = methods[0] if isinstance(methods, list) and methods else None
    tokens = first.get("speculative_tokens") if isinstance(first, dict) else None
    if type(tokens) is not int or tokens < 1:
        key = f"{where}.proposal_methods[0].speculative_tokens"
        faults.append(fault(key, brief(tokens), "the number of tokens to draft, at least 1"))
    verifier = section.get("verifier")
    name = verifier.get("name_or_path") if isinstance(verifier, dict) else None
    if not isinstance(name, str) or not name:
        key = f"{where}.verifier.name_or_path"
        faults.append(fault(key, brief(name), "the target's folder or Hub id"))
    return faults
