"""Tiny random models of the supported classes, saved as real folders, for tests.

A twin has the architecture of the real target and a hidden size of 64, so a test costs milliseconds.
Weights are drawn wide, and norms away from 1, so that a forgotten norm, scale or softcap shows up.
The tokenizer is real: byte-level BPE with a few merges, ChatML specials and a ChatML template.

Ids of the tokenizer: 0 `<|endoftext|>` (unk), 1 `<|im_start|>`, 2 `<|im_end|>` (eos and pad),
3 `<repo_name>`, 4 `<file_sep>`, then bytes and merges; the last ids below `vocab` have no token.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<repo_name>", "<file_sep>"]
MERGES = [("t", "h"), ("th", "e"), ("i", "n"), ("e", "r"), ("o", "n"), ("a", "n"), ("Ġ", "a"), ("Ġ", "the")]
CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def save_tokenizer(folder: Path) -> int:
    """Writes the tokenizer; returns how many tokens it has."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    # Printable ASCII, newline (Ċ) and space (Ġ) as byte-level BPE spells them.
    letters = [chr(code) for code in range(33, 127)] + ["Ċ", "Ġ"]
    texts = SPECIALS + letters + ["".join(merge) for merge in MERGES]
    bare = Tokenizer(
        models.BPE(vocab={text: id for id, text in enumerate(texts)}, merges=MERGES, unk_token=SPECIALS[0])
    )
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    bare.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bare,
        unk_token=SPECIALS[0],
        bos_token=SPECIALS[1],
        eos_token=SPECIALS[2],
        pad_token=SPECIALS[2],
        chat_template=CHAT_TEMPLATE,
    )
    tokenizer.save_pretrained(folder)
    return len(tokenizer)


def _save(model_class: Any, config: Any, folder: Path | str, seed: int) -> Path:
    """Builds the model with wide random weights and saves it with the tokenizer."""
    folder = Path(folder)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = model_class(config)
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.data.uniform_(0.5, 1.5)
    model.save_pretrained(folder)
    tokens = save_tokenizer(folder)
    if tokens > config.get_text_config().vocab_size:
        raise ValueError(f"vocab must be at least {tokens}, the size of the twins' tokenizer")
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
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
    }


def tiny_llama(
    folder: Path | str, *, layers: int = 4, hidden: int = 64, vocab: int = 256, seed: int = 0, **changes: Any
) -> Path:
    """LlamaForCausalLM with tied embeddings, as SmolLM2. changes: any key of its config."""
    from transformers import LlamaConfig, LlamaForCausalLM

    settings = {**_sizes(layers, hidden, vocab), "tie_word_embeddings": True, **changes}
    return _save(LlamaForCausalLM, LlamaConfig(**settings), folder, seed)


def tiny_qwen2(
    folder: Path | str, *, layers: int = 4, hidden: int = 64, vocab: int = 256, seed: int = 0, **changes: Any
) -> Path:
    """Qwen2ForCausalLM: biases on q, k and v; its config has no head_dim."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    settings = {**_sizes(layers, hidden, vocab), **changes}
    del settings["head_dim"]
    return _save(Qwen2ForCausalLM, Qwen2Config(**settings), folder, seed)


def tiny_qwen3(
    folder: Path | str, *, layers: int = 4, hidden: int = 64, vocab: int = 256, seed: int = 0, **changes: Any
) -> Path:
    """Qwen3ForCausalLM: norms on q and k."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _save(Qwen3ForCausalLM, Qwen3Config(**{**_sizes(layers, hidden, vocab), **changes}), folder, seed)


def tiny_qwen3_moe(
    folder: Path | str, *, layers: int = 4, hidden: int = 64, vocab: int = 256, seed: int = 0, **changes: Any
) -> Path:
    """Qwen3MoeForCausalLM: 4 experts, 2 at a time."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": hidden}
    settings = {**_sizes(layers, hidden, vocab), **experts, **changes}
    return _save(Qwen3MoeForCausalLM, Qwen3MoeConfig(**settings), folder, seed)


def tiny_gpt_oss(
    folder: Path | str, *, layers: int = 4, hidden: int = 64, vocab: int = 256, seed: int = 0, **changes: Any
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
    return _save(GptOssForCausalLM, GptOssConfig(**settings), folder, seed)


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
    folder: Path | str, *, layers: int = 6, hidden: int = 64, vocab: int = 256, seed: int = 0, **changes: Any
) -> Path:
    """Gemma4ForCausalLM (text): scaled embeddings, softcap, window 8, full layers with wider heads."""
    from transformers import Gemma4ForCausalLM, Gemma4TextConfig

    return _save(
        Gemma4ForCausalLM, Gemma4TextConfig(**_gemma4_settings(layers, hidden, vocab, changes)), folder, seed
    )


def tiny_gemma4_multimodal(
    folder: Path | str, *, layers: int = 6, hidden: int = 64, vocab: int = 256, seed: int = 0, **changes: Any
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
    return _save(Gemma4ForConditionalGeneration, config, folder, seed)


TWINS = {
    "llama": tiny_llama,
    "qwen2": tiny_qwen2,
    "qwen3": tiny_qwen3,
    "qwen3_moe": tiny_qwen3_moe,
    "gpt_oss": tiny_gpt_oss,
    "gemma4": tiny_gemma4,
    "gemma4_multimodal": tiny_gemma4_multimodal,
}
