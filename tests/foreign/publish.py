"""Heads as others publish them, made of small heads of our own: so what must come back is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle_train.head.config import HeadConfig
from peagle_train.head.model import DrafterHead


def tensors_of(head: DrafterHead, dtype: torch.dtype, *, midlayer: bool = False) -> dict[str, Tensor]:
    """The head's tensors under the names of other makers, t2d beside d2t, mask_hidden as they shape it."""
    config = head.config
    tensors = {
        name: tensor.detach().clone() if name == "d2t" else tensor.detach().to(dtype)
        for name, tensor in head.state_dict().items()
        if name != "embed_tokens.weight" or config.own_embeddings
    }
    drafted = torch.zeros(config.vocab_size, dtype=torch.bool)
    drafted[head.draft_token_ids] = True
    tensors["t2d"] = drafted
    tensors.setdefault("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
    if midlayer:
        tensors = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in tensors.items()}
    return tensors


def llama_config(head: HeadConfig) -> dict[str, Any]:
    """The keys of a Llama config, as transformers 4 wrote them."""
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": head.hidden_size,
        "intermediate_size": head.intermediate_size,
        "num_hidden_layers": head.num_layers,
        "num_attention_heads": head.num_attention_heads,
        "num_key_value_heads": head.num_key_value_heads,
        "head_dim": head.head_dim,
        "vocab_size": head.vocab_size,
        "max_position_embeddings": head.max_position_embeddings,
        "rms_norm_eps": head.rms_norm_eps,
        "rope_theta": head.rope.theta,
        "tie_word_embeddings": False,
    }


def save(directory: Path, config: dict[str, Any], tensors: dict[str, Tensor]) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, directory / "model.safetensors"
    )
    return directory


def amazon(head: DrafterHead, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """As amazon/*-P-EAGLE: plain, layer 0 as `midlayer`, maps always there, ptd_token_id."""
    config = {
        **llama_config(head.config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "torch_dtype": str(dtype).removeprefix("torch."),
        "draft_vocab_size": head.config.draft_vocab_size,
        "ptd_token_id": head.config.mask_token_id,
        "eagle_config": {
            "eagle_aux_hidden_state_layer_ids": list(head.config.aux_layers),
            "use_aux_hidden_state": True,
        },
    }
    return save(directory, config, tensors_of(head, dtype, midlayer=True))


def speculators(head: DrafterHead, directory: Path, dtype: torch.dtype = torch.bfloat16) -> Path:
    """As vLLM's speculators library saves: method and target around the config of the layers."""
    ours = head.config
    inner = llama_config(ours)
    inner["model_type"] = ours.drafter
    inner["rope_parameters"] = {"rope_type": "default", "rope_theta": inner.pop("rope_theta")}
    mask = {} if ours.mask_token_id is None else {"mask_token_id": ours.mask_token_id}
    config = {
        "architectures": ["PEagleDraftModel" if mask else "Eagle3DraftModel"],
        "speculators_model_type": ours.method,
        "speculators_version": "0.5.0",
        "torch_dtype": str(dtype).removeprefix("torch."),
        "draft_vocab_size": ours.draft_vocab_size,
        "target_hidden_size": None,
        "eagle_aux_hidden_state_layer_ids": list(ours.aux_layers),
        **mask,
        "transformer_layer_config": inner,
        "speculators_config": {
            "algorithm": ours.method,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 6}],
            "verifier": {"name_or_path": "owner/target", "architectures": ["LlamaForCausalLM"]},
        },
    }
    return save(directory, config, tensors_of(head, dtype))


def eagle3(head: DrafterHead, directory: Path, dtype: torch.dtype = torch.float16) -> Path:
    """As the EAGLE authors' trainer and its heirs save: one `midlayer`, no aux ids, a short context."""
    config = {
        **llama_config(head.config),
        "architectures": ["LlamaForCausalLMEagle3"],
        "torch_dtype": str(dtype).removeprefix("torch."),
        "draft_vocab_size": head.config.draft_vocab_size,
        "max_position_embeddings": 128,
    }
    for key in ("head_dim", "rope_theta"):
        del config[key]
    return save(directory, config, tensors_of(head, dtype, midlayer=True))


def edit(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    value = json.loads((directory / "config.json").read_text())
    change(value)
    (directory / "config.json").write_text(json.dumps(value))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors")


def put(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda held: held.update(values)


def drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    return lambda held: [held.pop(key) for key in keys]
