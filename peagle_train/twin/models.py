"""Tiny random models of the supported classes, saved as real folders.

A twin has the architecture of the real target and a hidden size of 64, so a pass costs milliseconds.
Weights are drawn wide, and norms away from 1, so that a forgotten norm, scale or softcap shows up.
Its tokenizer, chat format and generation config are its family's in small: see tokenizers.py.

`tiny_llama` is SmolLM2's twin. Ids of its tokenizer: 0 `<|endoftext|>` (unk), 1 `<|im_start|>`,
2 `<|im_end|>` (eos and pad), 3 `<repo_name>`, 4 `<file_sep>`, then bytes and merges; the last ids below
`vocab` have no token.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from peagle_train.target.tokens import is_reserve, special_tokens
from peagle_train.twin.tokenizers import GEMMA4_MEDIA, SHAPES, save_tokenizer


def _sizes(layers: int, hidden: int, vocab: int) -> dict[str, Any]:
    return {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "vocab_size": vocab,
        "intermediate_size": 2 * hidden,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": hidden // 4,
        "max_position_embeddings": 512,
        "initializer_range": 0.15,
    }


def _llama(layers: int, hidden: int, vocab: int, changes: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    return LlamaConfig(**{**_sizes(layers, hidden, vocab), "tie_word_embeddings": True, **changes})


def _llama3(layers: int, hidden: int, vocab: int, changes: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    return LlamaConfig(**{**_sizes(layers, hidden, vocab), "rope_parameters": rope, **changes})


def _qwen2(layers: int, hidden: int, vocab: int, changes: dict[str, Any]) -> Any:
    from transformers import Qwen2Config

    settings = {**_sizes(layers, hidden, vocab), **changes}
    del settings["head_dim"]
    return Qwen2Config(**settings)


def _qwen3(layers: int, hidden: int, vocab: int, changes: dict[str, Any]) -> Any:
    from transformers import Qwen3Config

    return Qwen3Config(**{**_sizes(layers, hidden, vocab), **changes})


def _qwen3_moe(layers: int, hidden: int, vocab: int, changes: dict[str, Any]) -> Any:
    from transformers import Qwen3MoeConfig

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    return Qwen3MoeConfig(**{**_sizes(layers, hidden, vocab), **experts, **changes})


def _gpt_oss(layers: int, hidden: int, vocab: int, changes: dict[str, Any]) -> Any:
    from transformers import GptOssConfig

    positions = changes.get("max_position_embeddings", 512)
    rope = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": positions / 128,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "rope_parameters": rope}
    return GptOssConfig(**{**_sizes(layers, hidden, vocab), **own, **changes})


def _gemma4(layers: int, hidden: int, vocab: int, changes: dict[str, Any]) -> Any:
    from transformers import Gemma4TextConfig

    return Gemma4TextConfig(**_gemma4_settings(layers, hidden, vocab, changes))


def _gemma4_settings(layers: int, hidden: int, vocab: int, changes: dict[str, Any]) -> dict[str, Any]:
    kinds = ["full_attention" if layer % 3 == 2 else "sliding_attention" for layer in range(layers)]
    kinds[-1] = "full_attention"
    own = {
        "hidden_size_per_layer_input": 0,
        "final_logit_softcapping": 5.0,
        "sliding_window": 8,
        "layer_types": kinds,
        "global_head_dim": hidden // 2,
        "tie_word_embeddings": True,
    }
    return {**_sizes(layers, hidden, vocab), **own, **changes}


def _gemma4_multimodal(layers: int, hidden: int, vocab: int, changes: dict[str, Any]) -> Any:
    from transformers import Gemma4Config

    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    text = _gemma4_settings(layers, hidden, vocab, changes)
    return Gemma4Config(text_config=text, vision_config=vision, audio_config=None)


CONFIGS: dict[str, tuple[str, Callable[[int, int, int, dict[str, Any]], Any]]] = {
    "llama": ("LlamaForCausalLM", _llama),
    "llama3": ("LlamaForCausalLM", _llama3),
    "qwen2": ("Qwen2ForCausalLM", _qwen2),
    "qwen3": ("Qwen3ForCausalLM", _qwen3),
    "qwen3_moe": ("Qwen3MoeForCausalLM", _qwen3_moe),
    "gpt_oss": ("GptOssForCausalLM", _gpt_oss),
    "gemma4": ("Gemma4ForCausalLM", _gemma4),
    "gemma4_multimodal": ("Gemma4ForConditionalGeneration", _gemma4_multimodal),
}
"""Each twin's class of transformers, and what makes its config from layers, hidden size, rows and changes."""


def config_of(kind: str, layers: int, hidden: int, vocab: int, **changes: Any) -> Any:
    """The config of a twin, without weights. changes: any key of it."""
    class_name, make = CONFIGS[kind]
    config = make(layers, hidden, vocab, changes)
    config.architectures = [class_name]
    return config


def tiny(
    kind: str,
    folder: Path | str,
    *,
    layers: int = 4,
    hidden: int = 64,
    vocab: int = 320,
    seed: int = 0,
    reticent: bool = False,
    **changes: Any,
) -> Path:
    """Writes the twin `kind` into `folder` with wide random weights and its family's tokenizer.

    Args:
        kind: a key of CONFIGS.
        folder: receives config.json, generation_config.json, safetensors, tokenizer and chat template.
        vocab: rows of the table; at least the tokenizer's.
        reticent: it does not say what no text holds, tokens in reserve and rows without one: training leaves
            them unlikely, and chance would make a mask token of a twin's data now and then.
        changes: any key of the config.
    """
    import transformers

    folder = Path(folder)
    config = config_of(kind, layers, hidden, vocab, **changes)
    text = config.get_text_config()
    tokenizer = save_tokenizer(folder, TOKENIZERS[kind], text.vocab_size)
    for role in ("bos", "eos", "pad"):
        setattr(text, f"{role}_token_id", getattr(tokenizer, f"{role}_token_id"))
    if kind == "gemma4_multimodal":
        for role, token in GEMMA4_MEDIA.items():
            setattr(config, f"{role}_token_id", tokenizer.get_vocab()[token])
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model: Any = getattr(transformers, CONFIGS[kind][0])(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.uniform_(0.5, 1.5)
        if reticent:
            model.get_output_embeddings().weight.data[_unsaid(tokenizer, text.vocab_size)] *= 0.05
    ends = tokenizer.convert_tokens_to_ids(list(SHAPES[TOKENIZERS[kind]].ends))
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.save_pretrained(folder)
    return folder


def _unsaid(tokenizer: Any, vocab: int) -> list[int]:
    reserve = {id for id, token in special_tokens(tokenizer).items() if is_reserve(token)}
    return sorted(reserve | (set(range(vocab)) - set(tokenizer.get_vocab().values())))


def tiny_llama(folder: Path | str, **settings: Any) -> Path:
    """LlamaForCausalLM with tied embeddings, as SmolLM2. settings: those of `tiny`, for all of these."""
    return tiny("llama", folder, **{"vocab": 256, **settings})


def tiny_llama3(folder: Path | str, **settings: Any) -> Path:
    """LlamaForCausalLM as Llama 3.1: RoPE of its own kind, a head of its own, three end tokens."""
    return tiny("llama3", folder, **settings)


def tiny_qwen2(folder: Path | str, **settings: Any) -> Path:
    """Qwen2ForCausalLM: biases on q, k and v; its config has no head_dim."""
    return tiny("qwen2", folder, **settings)


def tiny_qwen3(folder: Path | str, **settings: Any) -> Path:
    """Qwen3ForCausalLM: norms on q and k."""
    return tiny("qwen3", folder, **settings)


def tiny_qwen3_moe(folder: Path | str, **settings: Any) -> Path:
    """Qwen3MoeForCausalLM: 4 experts, 2 at a time."""
    return tiny("qwen3_moe", folder, **settings)


def tiny_gpt_oss(folder: Path | str, **settings: Any) -> Path:
    """GptOssForCausalLM: experts, attention sinks, window 8 on every other layer, YaRN."""
    return tiny("gpt_oss", folder, **settings)


def tiny_gemma4(folder: Path | str, **settings: Any) -> Path:
    """Gemma4ForCausalLM (text): scaled embeddings, softcap, window 8, full layers with wider heads."""
    return tiny("gemma4", folder, **{"layers": 6, "vocab": 448, **settings})


def tiny_gemma4_multimodal(folder: Path | str, **settings: Any) -> Path:
    """Gemma4ForConditionalGeneration: the text model inside the multimodal class."""
    return tiny("gemma4_multimodal", folder, **{"layers": 6, "vocab": 448, **settings})


TWINS = {
    "llama": tiny_llama,
    "llama3": tiny_llama3,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "qwen3_moe": tiny_qwen3_moe,
    "gpt_oss": tiny_gpt_oss,
    "gemma4": tiny_gemma4,
    "gemma4_multimodal": tiny_gemma4_multimodal,
}

TOKENIZERS = {name: name for name in TWINS} | {"llama": "smollm2", "gemma4_multimodal": "gemma4"}
"""Which of tokenizers.SHAPES each twin has."""

MASK_TOKENS = {name: SHAPES[family].mask_id for name, family in TOKENIZERS.items()}
"""An id that can be each twin's mask token: nothing else uses it."""
