"""From a GGUF file to the folder that every other tool reads: config, safetensors, tokenizer.

Transformers can load GGUF too, but needs 40 s for this size, refuses to save the result, and drops
the file's pre-tokenizer. Here the Llama architecture is converted directly; the tests compare every
tensor with what transformers makes of the same file.

Three things are easy to get wrong, and silent:
- the q and k rows are stored pairwise interleaved for llama.cpp's RoPE; transformers wants the two
  halves of each head apart (see `_halves_apart`);
- `rms_norm_eps` was stored as a float32: 1e-5 reads back as 9.999999747378752e-06;
- `tokenizer.ggml.pre` names how text is split before BPE; without it digits are split differently.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from peagle_train.errors import PeagleError
from peagle_train.files import write_json, write_text
from peagle_train.target.gguf_file import GGUFFile
from peagle_train.tensors import save_tensors

# Raise it whenever the folder's content would change: older folders are then converted again.
CONVERTER_VERSION = 1

_TENSORS = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER_TENSORS = {
    "attn_norm.weight": "input_layernorm.weight",
    "attn_q.weight": "self_attn.q_proj.weight",
    "attn_k.weight": "self_attn.k_proj.weight",
    "attn_v.weight": "self_attn.v_proj.weight",
    "attn_output.weight": "self_attn.o_proj.weight",
    "ffn_norm.weight": "post_attention_layernorm.weight",
    "ffn_gate.weight": "mlp.gate_proj.weight",
    "ffn_up.weight": "mlp.up_proj.weight",
    "ffn_down.weight": "mlp.down_proj.weight",
}
_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type


def read_settings(file: GGUFFile) -> dict[str, Any]:
    """What a GGUF header says, as the arguments of a `LlamaConfig`; needs no heavy import.

    Raises PeagleError for other architectures and for missing keys.
    """
    architecture = file.need("general.architecture")
    if architecture != "llama":
        raise PeagleError(
            f"{file.path}: GGUF architecture {architecture!r}; only 'llama' is converted. "
            "Give the target as a folder or Hub id with safetensors instead."
        )
    if any(key.startswith("llama.rope.scaling") for key in file.keys) or "rope_freqs.weight" in file.tensors:
        raise PeagleError(
            f"{file.path}: the file carries RoPE scaling, which is not converted. "
            "Give the target as a folder or Hub id with safetensors instead."
        )
    heads, hidden = file.need("llama.attention.head_count"), file.need("llama.embedding_length")
    return {
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": file.tensors["token_embd.weight"].shape[0],
        "hidden_size": hidden,
        "intermediate_size": file.need("llama.feed_forward_length"),
        "num_hidden_layers": file.need("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": file.need("llama.attention.head_count_kv"),
        "head_dim": file.keys.get("llama.attention.key_length", hidden // heads),
        "max_position_embeddings": file.need("llama.context_length"),
        "rms_norm_eps": _as_written(file.need("llama.attention.layer_norm_rms_epsilon")),
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": _as_written(file.need("llama.rope.freq_base")),
        },
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": file.keys.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.need("tokenizer.ggml.eos_token_id"),
        "pad_token_id": file.keys.get("tokenizer.ggml.padding_token_id"),
        "dtype": "float32",
    }


def convert(file: GGUFFile, folder: Path, progress: Progress) -> None:
    """Writes config, generation config, weights (float32) and tokenizer into `folder`, which must exist.

    Raises PeagleError where the file holds a tensor that has no place in the model, or lacks one.
    """
    import torch
    from transformers import LlamaConfig

    settings = read_settings(file)
    config = LlamaConfig(**settings)
    weights: dict[str, torch.Tensor] = {}
    task = progress.add_task(f"converting {file.path.name}", total=len(file.tensors))
    for name in file.tensors:
        values = file.read(name)
        if name.endswith(".attn_q.weight"):
            values = _halves_apart(values, settings["num_attention_heads"])
        elif name.endswith(".attn_k.weight"):
            values = _halves_apart(values, settings["num_key_value_heads"])
        weights[_name_in_transformers(file, name)] = torch.from_numpy(np.ascontiguousarray(values))
        progress.advance(task)
    _check_complete(file, weights, config)
    save_tensors(folder / "model.safetensors", weights, {"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors keeps files to their owner
    config.save_pretrained(folder)
    stop = {"eos_token_id": config.eos_token_id, "pad_token_id": config.pad_token_id}
    write_json(folder / "generation_config.json", {"bos_token_id": config.bos_token_id, **stop})
    _write_tokenizer(file, folder, config.max_position_embeddings)


def _name_in_transformers(file: GGUFFile, name: str) -> str:
    if name in _TENSORS:
        return _TENSORS[name]
    block, number, rest = [*name.split(".", 2), "", ""][:3]
    if block == "blk" and number.isdigit() and rest in _LAYER_TENSORS:
        return f"model.layers.{number}.{_LAYER_TENSORS[rest]}"
    raise PeagleError(
        f"{file.path}: tensor {name!r} has no place in a Llama model; the file is of another kind"
    )


def _check_complete(file: GGUFFile, weights: dict[str, Any], config: Any) -> None:
    """Compares names and shapes with those of an empty model of the same config."""
    import torch
    from transformers import LlamaForCausalLM

    with torch.device("meta"):
        wanted = {name: tuple(value.shape) for name, value in LlamaForCausalLM(config).state_dict().items()}
    if config.tie_word_embeddings:
        wanted.pop("lm_head.weight")
    found = {name: tuple(value.shape) for name, value in weights.items()}
    wrong = [
        f"{name}: found {found.get(name, 'nothing')}, expected {wanted.get(name, 'nothing')}"
        for name in sorted(wanted.keys() | found.keys())
        if found.get(name) != wanted.get(name)
    ]
    if wrong:
        raise PeagleError(
            f"{file.path}: {len(wrong)} tensors do not fit its own header: " + "; ".join(wrong[:8])
        )


def _halves_apart(rows: np.ndarray, heads: int) -> np.ndarray:
    """Undoes llama.cpp's order of a head's rows: 0, d/2, 1, d/2 + 1, ... becomes 0, 1, ..., d - 1.

    rows: [heads * d, hidden] as stored; the result has the same shape.
    """
    count, hidden = rows.shape
    return rows.reshape(heads, count // heads // 2, 2, hidden).swapaxes(1, 2).reshape(count, hidden)


def _as_written(value: float) -> float:
    """The shortest decimal with the same float32 value: what the author of the config wrote."""
    return float(str(np.float32(value)))


def _write_tokenizer(file: GGUFFile, folder: Path, max_length: int) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    model, split = file.need("tokenizer.ggml.model"), file.need("tokenizer.ggml.pre")
    # GGUF names the split, the rule itself stands in llama.cpp (src/llama-vocab.cpp).
    splits: dict[str, list[Any]] = {
        "smollm": [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ],
        "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)],
    }
    if model != "gpt2" or split not in splits:
        raise PeagleError(
            f"{file.path}: tokenizer model {model!r} with pre-tokenizer {split!r}; converted are model "
            f"'gpt2' with one of {sorted(splits)}. Give the target "
            "as a folder or Hub id with safetensors instead."
        )
    texts: list[str] = file.need("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in file.need("tokenizer.ggml.merges")]
    bare = Tokenizer(models.BPE(vocab={text: id for id, text in enumerate(texts)}, merges=merges))
    bare.pre_tokenizer = pre_tokenizers.Sequence(splits[split])
    bare.decoder = decoders.ByteLevel()
    kinds: list[int] = file.need("tokenizer.ggml.token_type")
    for text, kind in zip(texts, kinds, strict=True):
        if kind in (_CONTROL, _USER_DEFINED):
            special = kind == _CONTROL
            bare.add_tokens([AddedToken(text, special=special, normalized=False)])
    roles = {
        f"{role}_token": texts[file.keys[f"tokenizer.ggml.{key}_token_id"]]
        for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items()
        if f"tokenizer.ggml.{key}_token_id" in file.keys
    }
    if len(bare.get_vocab()) != len(texts):
        raise PeagleError(f"{file.path}: {len(texts)} tokens but {len(bare.get_vocab())} different texts")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare, model_max_length=max_length, **roles)
    tokenizer.save_pretrained(folder)
    write_text(folder / "chat_template.jinja", file.need("tokenizer.chat_template"))
