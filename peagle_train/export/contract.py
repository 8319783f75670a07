"""What vLLM reads from a head's directory: the keys of config.json, the tensors' names and shapes.

This is the only place that knows vLLM's layout; the writer, the reader and the checks all ask here.
Sources (vLLM 0.32): model_executor/models/llama_eagle3.py for tensors and options,
v1/spec_decode/llm_base_proposer.py for the mask token, transformers_utils/configs/eagle.py for the rest.

Three things fail silently in vLLM and are therefore always written and always checked:

    num_aux_hidden_states   left out, the Llama drafter sizes fc for 3 layers
    rope_theta              left out, RoPE turns with base 10000
    draft_vocab_size        left out, the target's vocabulary is assumed and d2t becomes an unknown tensor
"""

from __future__ import annotations

from typing import Any

import torch

from peagle_train.head.config import HeadConfig

ARCHITECTURE = "LlamaForCausalLMEagle3"
CONFIG_FILE = "config.json"
WEIGHTS_FILE = "model.safetensors"
RECORD_FILE = "export.json"
EMBEDDINGS = "embed_tokens.weight"

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

# Options of vLLM's drafter that change what it computes, with the one value our head computes.
FIXED_OPTIONS: dict[str, Any] = {
    "hidden_act": "silu",
    "attention_bias": False,
    "mlp_bias": False,
    "tie_word_embeddings": False,
    "norm_before_residual": False,
    "norm_before_fc": False,
    "fc_norm": False,
    "norm_output": False,
    "logit_scale": 1.0,
}

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
    "rope_theta": "rope_theta",
}
REAL_KEYS = ("rms_norm_eps", "rope_theta")

# Both are written with the same value; vLLM looks for `pard_token` first.
MASK_KEYS = ("pard_token", "ptd_token_id")


def plain_config(head: HeadConfig, dtype: str) -> dict[str, Any]:
    """config.json of a head served with `--speculative-config`: a flat Llama config plus EAGLE-3's keys."""
    config: dict[str, Any] = {"architectures": [ARCHITECTURE], "model_type": "llama", "dtype": dtype}
    config.update({key: getattr(head, field) for key, field in COPIED_KEYS.items()})
    config.update(FIXED_OPTIONS)
    config.update(dict.fromkeys(MASK_KEYS, head.mask_token_id))
    layers = list(head.aux_layers)
    config["eagle_aux_hidden_state_layer_ids"] = layers
    config["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": layers, "use_aux_hidden_state": True}
    config["num_aux_hidden_states"] = len(layers)
    return config


def head_config(config: dict[str, Any], *, own_embeddings: bool) -> HeadConfig:
    """The inverse of `plain_config`, for a config that passed the checks."""
    fields = {field: config[key] for key, field in COPIED_KEYS.items()}
    fields.update({COPIED_KEYS[key]: float(config[key]) for key in REAL_KEYS})
    return HeadConfig(
        **fields,
        aux_layers=tuple(config["eagle_aux_hidden_state_layer_ids"]),
        mask_token_id=config[MASK_KEYS[0]],
        own_embeddings=own_embeddings,
    )


def tensor_shapes(head: HeadConfig) -> dict[str, tuple[int, ...]]:
    """Every tensor a complete head holds, and its shape.

    H hidden, TH target hidden, A aux layers, V vocabulary, DV draft vocabulary, I intermediate.
    `embed_tokens.weight` belongs to heads with their own embeddings, `d2t` to reduced vocabularies:
    beside a full vocabulary vLLM has no place for d2t and refuses to load.
    """
    hidden, intermediate = head.hidden_size, head.intermediate_size
    query = head.num_attention_heads * head.head_dim
    key = head.num_key_value_heads * head.head_dim
    aux_width = len(head.aux_layers) * head.target_hidden_size

    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (hidden, aux_width),
        "norm.weight": (hidden,),
        "lm_head.weight": (head.draft_vocab_size, hidden),
        "mask_hidden": (1, 1, aux_width),
        "layers.0.hidden_norm.weight": (hidden,),
    }
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
    if head.own_embeddings:
        shapes[EMBEDDINGS] = (head.vocab_size, hidden)
    if head.draft_vocab_size != head.vocab_size:
        shapes["d2t"] = (head.draft_vocab_size,)
    return shapes
