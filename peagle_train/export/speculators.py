"""The speculators format: `vllm serve HEAD` alone finds the target, the method and K.

Source: vLLM 0.32, transformers_utils/configs/speculators/{base,algos}.py. vLLM takes the format by the key
`speculators_config` when the top level names no `model_type`; it then uses `transformer_layer_config` as it
stands, without the defaults of a Llama config, and adds to it what it finds at the top level:

    {"speculators_model_type": "peagle", "mask_token_id": 3, "draft_vocab_size": ..., ...,
     "transformer_layer_config": { the plain config },
     "speculators_config": {"proposal_methods": [{"speculative_tokens": K, ...}],
                            "verifier": {"name_or_path": TARGET, ...}}}

The tensors are the same in both formats.
"""

from __future__ import annotations

from typing import Any

from peagle_train.export.faults import brief, fault, under

ALGORITHM = "peagle"
# Repeated at the top level because vLLM's update for `peagle` reads them there and overwrites the inner ones,
# with null if they are missing.
MIRRORED_KEYS = (
    "draft_vocab_size",
    "target_hidden_size",
    "norm_before_residual",
    "norm_before_fc",
    "eagle_aux_hidden_state_layer_ids",
)


def wrap(
    plain: dict[str, Any], *, target: str, target_class: str, speculative_tokens: int, writer: str
) -> dict[str, Any]:
    """A plain config as speculators config. `target` is the folder or Hub id that vLLM shall load."""
    return {
        "architectures": ["PEagleDraftModel"],
        "speculators_model_type": ALGORITHM,
        "written_by": writer,
        "dtype": plain["dtype"],
        "mask_token_id": plain["pard_token"],
        **{key: plain[key] for key in MIRRORED_KEYS},
        "transformer_layer_config": plain,
        "speculators_config": {
            "algorithm": ALGORITHM,
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
    key = "speculators_model_type"
    if config.get(key) != ALGORITHM:
        faults.append(fault(key, under(config, key), f"{ALGORITHM!r}: another name means another method"))
    key = "transformer_layer_config"
    inner = config.get(key)
    if not isinstance(inner, dict):
        faults.append(fault(key, under(config, key), "an object with the head's sizes"))
        inner = {}
    faults += _serving_faults(config["speculators_config"])
    for key in (*MIRRORED_KEYS, "mask_token_id"):
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
