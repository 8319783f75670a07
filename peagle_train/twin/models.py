"""Tiny random models of the supported classes, saved as real folders.

A twin has the architecture of the real target and a hidden size of 64, so a pass costs milliseconds.
Weights are drawn wide, and norms away from 1, so that a forgotten norm, scale or softcap shows up.
Its tokenizer, chat format and generation config are its family's in small: see tokenizers.py.

`tiny_llama` is SmolLM2's twin. Ids of its tokenizer: 0 `<|endoftext|>` (unk), 1 `<|im_start|>`,
2 `<|im_end|>` (eos and pad), 3 `<repo_name>`, 4 `<file_sep>`, then bytes and merges; the last ids below
`vocab` have no token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from peagle_train.twin.tokenizers import GEMMA4_MEDIA, SHAPES, save_tokenizer


def _save(model_class: Any, config: Any, folder: Path | str, seed: int, family: str) -> Path:
    """Builds the model with wide random weights and saves it with its family's tokenizer."""
    folder = Path(folder)
    text = config.get_text_config()
    tokenizer = save_tokenizer(folder, family, text.vocab_size)
    for role in ("bos", "eos", "pad"):
        setattr(text, f"{role}_token_id", getattr(tokenizer, f"{role}_token_id"))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.uniform_(0.5, 1.5)
    ends = tokenizer.convert_tokens_to_ids(list(SHAPES[family].ends))
    model.generation_config.eos_token_id = ends if len(ends) > 1 else ends[0]
    model.generation_config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.bos_token_id = tokenizer.bos_token_id
    model.save_pretrained(folder)
    return folder


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


def tiny_llama(
    folder: Path | str, *, layers: int = 4, hidden: int = 64, vocab: int = 256, seed: int = 0, **changes: Any
) -> Path:
    """LlamaForCausalLM with tied embeddings, as SmolLM2. changes: any key of its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {**_sizes(layers, hidden, vocab), "tie_word_embeddings": True, **changes}
    return _save(LlamaForCausalLM, LlamaConfig(**settings), folder, seed, "smollm2")


def tiny_llama3(
    folder: Path | str, *, layers: int = 4, hidden: int = 64, vocab: int = 320, seed: int = 0, **changes: Any
) -> Path:
    """LlamaForCausalLM as Llama 3.1: RoPE of its own kind, a head of its own, three end tokens."""
    from transformers import LlamaConfig, LlamaForCausalLM

    rope = {
        "rope_type": "llama3",
        "rope_theta": 500000.0,
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
    settings = {**_sizes(layers, hidden, vocab), "rope_parameters": rope, **changes}
    return _save(LlamaForCausalLM, LlamaConfig(**settings), folder, seed, "llama3")


def tiny_qwen2(
    folder: Path | str, *, layers: int = 4, hidden: int = 64, vocab: int = 320, seed: int = 0, **changes: Any
) -> Path:
    """Qwen2ForCausalLM: biases on q, k and v; its config has no head_dim."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings = {**_sizes(layers, hidden, vocab), **changes}
    del settings["head_dim"]
    return _save(Qwen2ForCausalLM, Qwen2Config(**settings), folder, seed, "qwen2")


def tiny_qwen3(
    folder: Path | str, *, layers: int = 4, hidden: int = 64, vocab: int = 320, seed: int = 0, **changes: Any
) -> Path:
    """Qwen3ForCausalLM: norms on q and k."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    settings = {**_sizes(layers, hidden, vocab), **changes}
    return _save(Qwen3ForCausalLM, Qwen3Config(**settings), folder, seed, "qwen3")


def tiny_qwen3_moe(
    folder: Path | str, *, layers: int = 4, hidden: int = 64, vocab: int = 320, seed: int = 0, **changes: Any
) -> Path:
    """Qwen3MoeForCausalLM: 4 experts, 2 at a time."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    settings = {**_sizes(layers, hidden, vocab), **experts, **changes}
    return _save(Qwen3MoeForCausalLM, Qwen3MoeConfig(**settings), folder, seed, "qwen3_moe")


def tiny_gpt_oss(
    folder: Path | str, *, layers: int = 4, hidden: int = 64, vocab: int = 320, seed: int = 0, **changes: Any
) -> Path:
    """GptOssForCausalLM: experts, attention sinks, window 8 on every other layer, YaRN."""
    from transformers import GptOssConfig, GptOssForCausalLM

    rope = {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
    }
    own = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "rope_parameters": rope}
    settings = {**_sizes(layers, hidden, vocab), **own, **changes}
    return _save(GptOssForCausalLM, GptOssConfig(**settings), folder, seed, "gpt_oss")


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


def tiny_gemma4(
    folder: Path | str, *, layers: int = 6, hidden: int = 64, vocab: int = 448, seed: int = 0, **changes: Any
) -> Path:
    """Gemma4ForCausalLM (text): scaled embeddings, softcap, window 8, full layers with wider heads."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    config = Gemma4TextConfig(**_gemma4_settings(layers, hidden, vocab, changes))
    return _save(Gemma4ForCausalLM, config, folder, seed, "gemma4")


def tiny_gemma4_multimodal(
    folder: Path | str, *, layers: int = 6, hidden: int = 64, vocab: int = 448, seed: int = 0, **changes: Any
) -> Path:
    """Gemma4ForConditionalGeneration: the text model inside the multimodal class."""
    from transformers import Gemma4Config, Gemma4ForConditionalGeneration

    vision = {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 16,
    }
    text = _gemma4_settings(layers, hidden, vocab, changes)
    config = Gemma4Config(text_config=text, vision_config=vision, audio_config=None)
    names = save_tokenizer(Path(folder), "gemma4", vocab).get_vocab()
    for role, token in GEMMA4_MEDIA.items():
        setattr(config, f"{role}_token_id", names[token])
    return _save(Gemma4ForConditionalGeneration, config, folder, seed, "gemma4")


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
