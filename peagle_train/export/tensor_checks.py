"""Checks of model.safetensors: complete, nothing foreign, right shapes and dtypes, finite, a sound d2t."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from peagle_train.export.contract import CONFIG_FILE, EMBEDDINGS, WEIGHTS_FILE, tensor_shapes
from peagle_train.export.faults import AGAIN, fault
from peagle_train.head.config import HeadConfig

# safetensors' names of the dtypes a head may be stored in.
_STORED = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_REMOVE = f"remove it or {AGAIN}"


def check_tensors(
    directory: Path,
    config: HeadConfig | None,
    dtype: str | None,
    *,
    claimed_own: Any,
    facts: dict[str, Any],
) -> tuple[HeadConfig | None, int, list[str]]:
    """Checks the weights against the config.

    Args:
        config: sizes from config.json; None if they could not be read: then only the file itself,
            dtypes and finiteness are checked.
        dtype: what config.json says the floating tensors are; None if it says nothing sound.
        claimed_own: whether export.json says the head has its own embeddings; None if it says nothing.
        facts: the target's numbers, may be empty.

    Returns:
        The config with `own_embeddings` as the file has it, the number of parameters, the faults.
    """
    faults = _foreign_files(directory)
    path = directory / WEIGHTS_FILE
    if not path.is_file():
        faults.append(fault(WEIGHTS_FILE, "missing", "the head's tensors"))
        return config, 0, faults
    parameters = 0
    try:
        with safe_open(path, framework="pt") as file:
            names = sorted(file.keys())
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in names}
            stored = {name: file.get_slice(name).get_dtype() for name in names}
            if config is not None:
                config = replace(config, own_embeddings=EMBEDDINGS in shapes)
                faults += _name_and_shape_faults(config, shapes)
                faults += _embedding_faults(config, claimed_own, facts)
            faults += _dtype_faults(stored, dtype)
            for name in names:
                tensor = file.get_tensor(name)
                if name == "d2t":
                    faults += _map_faults(tensor, config)
                    continue
                parameters += tensor.numel()
                faults += _value_faults(name, tensor)
    except (SafetensorError, OSError) as error:
        wanted = "the whole file that the export wrote"
        faults.append(fault(WEIGHTS_FILE, f"not readable ({error})", wanted, f"copy it again or {AGAIN}"))
    return config, parameters, faults


def held_faults(tensors: dict[str, torch.Tensor], config: HeadConfig, facts: dict[str, Any]) -> list[str]:
    """The same checks of tensors that are in memory under our names, whatever file they came from."""
    shapes = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    faults = _name_and_shape_faults(config, shapes)
    faults += _embedding_faults(config, None, facts)
    for name, tensor in tensors.items():
        if name != "d2t":
            faults += _value_faults(name, tensor)
        elif tensor.dtype != torch.int64:
            faults.append(fault(_where(name), f"dtype {tensor.dtype}", "torch.int64, offsets"))
        else:
            faults += _map_faults(tensor, config)
    return faults


def tensor_names(directory: Path) -> set[str]:
    """Names in model.safetensors; none if it cannot be read (`check_tensors` says why)."""
    try:
        with safe_open(directory / WEIGHTS_FILE, framework="pt") as file:
            return set(file.keys())
    except (SafetensorError, OSError):
        return set()


def _where(name: str) -> str:
    return f"{WEIGHTS_FILE}: {name}"


def _foreign_files(directory: Path) -> list[str]:
    """vLLM loads every *.safetensors file of a directory, so a second one would mix into the head."""
    wanted = f"{WEIGHTS_FILE} alone, since vLLM loads all weights files of a directory"
    return [
        fault(path.name, "a second weights file", wanted, "remove it")
        for path in sorted(directory.glob("*.safetensors*"))
        if path.name != WEIGHTS_FILE
    ]


def _name_and_shape_faults(config: HeadConfig, shapes: dict[str, tuple[int, ...]]) -> list[str]:
    expected = tensor_shapes(config)
    faults = []
    for name in sorted(expected.keys() - shapes.keys()):
        without = "loads without it and drafts garbage"
        if name == "lm_head.weight" and not config.reduced_vocabulary:
            without = "would take the target's in its place, and no one trained with that"
        wanted = f"shape {list(expected[name])}: vLLM {without}"
        faults.append(fault(_where(name), "missing", wanted))
    for name in sorted(shapes.keys() - expected.keys()):
        if name == "d2t":
            wanted = f"none beside a full vocabulary (draft_vocab_size = vocab_size = {config.vocab_size})"
            faults.append(fault(_where(name), "present", wanted, _REMOVE))
        else:
            wanted = (
                f"only the tensors of vLLM's {config.drafter} drafter with {config.num_layers} layers "
                f"and the options of {CONFIG_FILE}"
            )
            faults.append(fault(_where(name), "unknown tensor", wanted, _REMOVE))
    for name in sorted(expected.keys() & shapes.keys()):
        now, wanted_shape = shapes[name], expected[name]
        # vLLM views mask_hidden as [1, A * TH] whatever its shape.
        flat = name == "mask_hidden" and math.prod(now) == math.prod(wanted_shape)
        if now != wanted_shape and not flat:
            faults.append(fault(_where(name), f"shape {list(now)}", f"{list(wanted_shape)} by config.json"))
    return faults


def _embedding_faults(config: HeadConfig, claimed_own: Any, facts: dict[str, Any]) -> list[str]:
    where = _where(EMBEDDINGS)
    if claimed_own is True and not config.own_embeddings:
        wanted = f"{[config.vocab_size, config.hidden_size]}, trained with this head (export.json)"
        return [fault(where, "missing", wanted)]
    if claimed_own is False and config.own_embeddings:
        return [fault(where, "present", "none: this head shares the target's (export.json)", _REMOVE)]
    width = facts.get("hidden_size", config.target_hidden_size)
    if not config.own_embeddings and config.hidden_size != width:
        wanted = f"a table of its own, since the target's is {width} wide and the head {config.hidden_size}"
        return [fault(where, "missing", wanted, "train with head.embeddings: own")]
    return []


def _dtype_faults(stored: dict[str, str], dtype: str | None) -> list[str]:
    faults = []
    allowed = list(_STORED.values()) if dtype is None else [_STORED[dtype]]
    for name, kind in stored.items():
        wanted = ["I64"] if name == "d2t" else allowed
        if kind not in wanted:
            reason = "offsets" if name == "d2t" else "by dtype in config.json"
            faults.append(fault(_where(name), f"dtype {kind}", f"{' or '.join(wanted)} {reason}"))
    return faults


def _value_faults(name: str, tensor: torch.Tensor) -> list[str]:
    if not tensor.is_floating_point():
        return []  # the dtype is already a fault
    wrong = tensor.numel() - int(torch.isfinite(tensor.float()).sum())
    if not wrong:
        # The placeholder state and biases may be anything; a matrix or norm of zeros was never filled.
        if name == "mask_hidden" or name.endswith(".bias") or bool(tensor.any()):
            return []
        return [fault(_where(name), "nothing but zeros", "trained values", "export the head again")]
    found = f"{wrong:,} of {tensor.numel():,} values are NaN or infinite"
    return [fault(_where(name), found, "finite numbers", "export an earlier checkpoint")]


def _map_faults(offsets: torch.Tensor, config: HeadConfig | None) -> list[str]:
    """d2t holds offsets: target id = draft id + d2t[draft id]."""
    if config is None or not config.reduced_vocabulary:
        return []
    if offsets.dtype != torch.int64 or tuple(offsets.shape) != (config.draft_vocab_size,):
        return []  # already a fault
    # As Python integers: in int64 a wild offset could wrap around into the range.
    values = offsets.tolist()
    ids = [index + offset for index, offset in enumerate(values)]
    outside = sum(not 0 <= token < config.vocab_size for token in ids)
    repeated = len(ids) - len(set(ids))

    rule = "offsets, target id = draft id + d2t[draft id]"
    looks_like_ids = len(set(values)) == len(values) and all(
        0 <= value < config.vocab_size for value in values
    )
    if looks_like_ids:
        rule += " (these look like target ids: subtract the draft ids)"
    faults = []
    if outside:
        found = f"{outside:,} of {len(ids):,} entries lead outside 0..{config.vocab_size - 1}"
        faults.append(fault(_where("d2t"), found, rule))
    if repeated:
        found = f"{repeated:,} target tokens appear more than once"
        faults.append(fault(_where("d2t"), found, f"every token once, as {rule}"))
    if config.mask_token_id in ids:
        found = f"the mask token {config.mask_token_id} is in the draft vocabulary"
        wanted = "it left out, since it is never an answer"
        faults.append(fault(_where("d2t"), found, wanted, "train with another draft vocabulary"))
    return faults
