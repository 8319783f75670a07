"""What vLLM reads from a head's directory: the keys of config.json, the tensors' names and shapes.

This is the only place that knows vLLM's layout; the writer, the reader, the checks and the import of
foreign heads all ask here. Sources (vLLM 0.32): model_executor/models/{llama,qwen3}_eagle3.py for tensors
and options, v1/spec_decode/llm_base_proposer.py for the mask token, transformers_utils/configs/ for the rest.

Three things fail silently in vLLM and are therefore always written and always checked:

    num_aux_hidden_states   left out, the Llama drafter sizes fc for 3 layers
    rope_theta              left out, RoPE turns with base 10000
    draft_vocab_size        left out, the target's vocabulary is assumed and d2t becomes an unknown tensor
"""

from __future__ import annotations

from typing import Any

import torch

from peagle_train.head.config import FULL, SLIDING, Drafter, HeadConfig, Method
from peagle_train.head.rope import Rope

CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
EMBEDDINGS = "embed_tokens.weight"
AUX_KEY = "eagle_aux_hidden_state_layer_ids"

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# model_type, which is the drafter's name -> the classes vLLM loads as that drafter; the first is written.
ARCHITECTURES: dict[Drafter, tuple[str, ...]] = {
    "llama": ("LlamaForCausalLMEagle3", "LlamaForCausalLM", "Eagle3LlamaForCausalLM"),
    "qwen3": ("Eagle3Qwen3ForCausalLM",),
}

# Keys of a Llama config that would change the arithmetic, with the one value that our head computes.
FIXED_OPTIONS: dict[str, Any] = {
    "hidden_act": "silu",
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "logit_scale": 1.0,
}

# Switches of the arithmetic; each is a field of HeadConfig of the same name.
OPTIONS = (
    "norm_before_residual",
    "norm_before_fc",
    "fc_norm",
    "norm_output",
    "attention_bias",
)

# What `layer_types` may say of a layer.
LAYER_KINDS = (FULL, SLIDING)

# config.json key -> HeadConfig field, for values that are copied as they are.
COPIED_KEYS: dict[str, str] = {
    "hidden_size": "hidden_size",
    "intermediate_size": "intermediate_size",
    "num_hidden_layers": "num_layers",
    "num_attention_heads": "num_attention_heads",
    "num_key_value_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "vocab_size": "vocab_size",
    "draft_vocab_size": "draft_vocab_size",
    "target_hidden_size": "target_hidden_size",
    "max_position_embeddings": "max_position_embeddings",
    "rms_norm_eps": "rms_norm_eps",
}

# Both are written with the same value; vLLM looks for `pard_token` first.
MASK_KEYS = ("pard_token", "ptd_token_id")


def plain_config(head: HeadConfig, dtype: str) -> dict[str, Any]:
    """config.json of a head served with `--speculative-config`: Llama's or Qwen3's, and EAGLE-3's keys."""
    config: dict[str, Any] = {
        "architectures": [ARCHITECTURES[head.drafter][0]],
        "model_type": head.drafter,
        "dtype": dtype,
    }
    config.update({key: getattr(head, field) for key, field in COPIED_KEYS.items()})
    config.update({key: getattr(head, key) for key in OPTIONS})
    config.update(FIXED_OPTIONS)
    config.update(_rope_keys(head.rope))
    config.update(_window_keys(head))
    if head.mask_token_id is not None:
        config.update(dict.fromkeys(MASK_KEYS, head.mask_token_id))
    layers = list(head.aux_layers)
    config[AUX_KEY] = layers
    config["eagle_config"] = {AUX_KEY: layers, "use_aux_hidden_state": True}
    config["num_aux_hidden_states"] = len(layers)
    return config


def _rope_keys(rope: Rope) -> dict[str, Any]:
    """theta stands flat; scaling in the section that every version of transformers reads."""
    if rope.rope_type == "default":
        return {"rope_theta": rope.theta}
    return {"rope_theta": rope.theta, "rope_scaling": {"rope_type": rope.rope_type, **rope.scaling}}


def _window_keys(head: HeadConfig) -> dict[str, Any]:
    """Nothing where no layer has a window: vLLM then gives none to any."""
    if head.sliding_window is None:
        return {}
    keys: dict[str, Any] = {"layer_types": list(head.layer_types), "sliding_window": head.sliding_window}
    if head.drafter == "qwen3":  # transformers drops the window of a Qwen3 config without this
        keys["use_sliding_window"] = True
    return keys


def head_config(config: dict[str, Any], *, method: Method, own_embeddings: bool) -> HeadConfig:
    """The inverse of `plain_config`, for a config that passed the checks."""
    fields = {field: config[key] for key, field in COPIED_KEYS.items()}
    fields["rms_norm_eps"] = float(fields["rms_norm_eps"])
    window = config.get("sliding_window")
    return HeadConfig(
        **fields,
        **{key: config[key] for key in OPTIONS},
        rope=Rope.from_parameters(config["rope_theta"], config.get("rope_scaling")),
        aux_layers=tuple(config[AUX_KEY]),
        mask_token_id=config[MASK_KEYS[0]] if method == "peagle" else None,
        own_embeddings=own_embeddings,
        method=method,
        drafter=config["model_type"],
        layer_types=() if window is None else tuple(config["layer_types"]),
        sliding_window=window,
    )


def method_of(config: dict[str, Any]) -> Method:
    """What a plain config drafts by: only a parallel head names a mask token."""
    return "peagle" if any(config.get(key) is not None for key in MASK_KEYS) else "eagle3"


def tensor_shapes(head: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a complete head holds, and its shape.

    H hidden, TH target hidden, A aux layers, V vocabulary, DV draft vocabulary, I intermediate.
    `mask_hidden` belongs to parallel heads, `embed_tokens.weight` to heads with their own embeddings, `d2t`
    to reduced vocabularies: beside a full vocabulary vLLM has no place for d2t and refuses to load.
    """
    hidden, intermediate = head.hidden_size, head.intermediate_size
    query = head.num_attention_heads * head.head_dim
    key = head.num_key_value_heads * head.head_dim

    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, head.aux_width),
        "norm.weight": (hidden,),
        "lm_head.weight": (head.draft_vocab_size, hidden),
        "layers.0.hidden_norm.weight": (hidden,),
    }
    if head.method == "peagle":
        shapes["mask_hidden"] = (1, 1, head.aux_width)
    if head.norm_before_fc:
        shapes["input_norm.weight"] = (head.aux_width,)
    if head.fc_norm:
        shapes |= {f"fc_norm.{i}.weight": (head.target_hidden_size,) for i in range(len(head.aux_layers))}
    for layer in range(head.num_layers):
        attention_input = 2 * hidden if layer == 0 else hidden  # layer 0 reads [embedding; hidden]
        prefix = f"layers.{layer}."
        shapes |= {
            prefix + "input_layernorm.weight": (hidden,),
            prefix + "post_attention_layernorm.weight": (hidden,),
            prefix + "self_attn.q_proj.weight": (query, attention_input),
            prefix + "self_attn.k_proj.weight": (key, attention_input),
            prefix + "self_attn.v_proj.weight": (key, attention_input),
            prefix + "self_attn.o_proj.weight": (hidden, query),
            prefix + "mlp.gate_proj.weight": (intermediate, hidden),
            prefix + "mlp.up_proj.weight": (intermediate, hidden),
            prefix + "mlp.down_proj.weight": (hidden, intermediate),
        }
        if head.attention_bias:
            shapes |= {
                prefix + "self_attn.q_proj.bias": (query,),
                prefix + "self_attn.k_proj.bias": (key,),
                prefix + "self_attn.v_proj.bias": (key,),
            }
            if head.drafter == "llama":
                shapes[prefix + "self_attn.o_proj.bias"] = (hidden,)
        if head.drafter == "qwen3":
            shapes[prefix + "self_attn.q_norm.weight"] = (head.head_dim,)
            shapes[prefix + "self_attn.k_norm.weight"] = (head.head_dim,)
    if head.own_embeddings:
        shapes[EMBEDDINGS] = (head.vocab_size, hidden)
    if head.draft_vocab_size != head.vocab_size:
        shapes["d2t"] = (head.draft_vocab_size,)
    return shapes
