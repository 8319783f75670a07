"""Weights of a foreign head under our names: one file or shards, any of the names that are published.

Names are turned as vLLM turns them (`midlayer.` is layer 0), and without the `model.` that some trainers
put before them. The maps of a reduced vocabulary come in several shapes and are held against each other:

    d2t   [DV] offsets, target id = i + d2t[i]; beside a full vocabulary all zero, and vLLM refuses it
    t2d   [V] whether a token can be drafted; vLLM ignores it
"""

from __future__ import annotations

import json
import math
import shlex
from itertools import pairwise
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from peagle_train.export.contract import DTYPES, WEIGHTS_FILE
from peagle_train.export.faults import OWN_TARGET, brief
from peagle_train.foreign.findings import Findings

INDEX = "model.safetensors.index.json"
_PICKLED = (".bin", ".pt", ".pth", ".ckpt")
# Pickles that trainers leave beside the weights.
_NO_WEIGHTS = ("training_args", "optimizer", "scheduler", "rng_state", "scaler")
_CONVERT = (
    "import sys, torch; from safetensors.torch import save_file; save_file({n: t.contiguous().clone() "
    "for f in sys.argv[2:] for n, t in torch.load(f, map_location='cpu', weights_only=True).items()}, "
    "sys.argv[1])"
)


def weights_files(directory: Path, findings: Findings) -> list[Path]:
    """The safetensors files of a head: those its index names, else the only one."""
    index = directory / INDEX
    found = sorted(directory.glob("*.safetensors"))
    if index.is_file():
        try:
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            files = [directory / Path(name).name for name in names]
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            findings.fault(INDEX, f"not readable ({error})", "a JSON object with a weight_map")
            return []
        for file in files:
            if not file.is_file():
                findings.fault(file.name, "missing", f"a file, since {INDEX} names it")
        return [file for file in files if file.is_file()]
    if len(found) > 1:
        several = ", ".join(file.name for file in found)
        wanted = f"one safetensors file, or {INDEX}, since vLLM would mix all of them"
        findings.fault("weights", several, wanted, "remove those that are not the head's")
    elif not found:
        pickled = sorted(
            directory.resolve() / file.name
            for file in directory.iterdir()
            if file.suffix in _PICKLED and not file.name.startswith(_NO_WEIGHTS)
        )
        there = ", ".join(file.name for file in pickled) or "missing"
        cure = _conversion(directory, pickled) if pickled else "is this the folder of a head?"
        findings.fault("weights", there, "a safetensors file", cure)
    return found if len(found) == 1 else []


def _conversion(directory: Path, pickled: list[Path]) -> str:
    """A command that works from any folder: its paths are absolute."""
    files = [directory.resolve() / WEIGHTS_FILE, *pickled]
    command = f'python -c "{_CONVERT}" {shlex.join(map(str, files))}'
    return f"pickled files run code when they are read; if you trust the maker, convert: {command}"


def read_tensors(files: list[Path], findings: Findings) -> dict[str, Tensor]:
    """All tensors of the files under our names."""
    tensors: dict[str, Tensor] = {}
    renamed: dict[str, list[str]] = {}
    for path in files:
        try:
            with safe_open(path, framework="pt") as file:
                for theirs in sorted(file.keys()):
                    ours, rule = _our_name(theirs)
                    if rule:
                        renamed.setdefault(rule, []).append(theirs)
                    if ours is None:
                        continue
                    if ours in tensors:
                        findings.fault(f"{path.name}: {theirs}", "a second tensor", f"one {ours}")
                    tensors[ours] = file.get_tensor(theirs)
        except (SafetensorError, OSError) as error:
            findings.fault(path.name, f"not readable ({error})", "a whole safetensors file")
    for rule, names in renamed.items():
        before, _, after = rule.partition(" -> ")
        findings.change(f"{len(names)} tensors" if len(names) > 1 else names[0], before, after)
    if len(files) > 1:
        findings.change("weights", f"{len(files)} files", "one")
    elif files and files[0].name != WEIGHTS_FILE:
        findings.change("weights", files[0].name, WEIGHTS_FILE)
    return tensors


def _our_name(theirs: str) -> tuple[str | None, str]:
    """Our name of a tensor (None: nothing that a head keeps) and the rule that changed it, if any."""
    if theirs.endswith("rotary_emb.inv_freq"):
        return None, "a table of RoPE -> left out: vLLM computes it"
    bare = theirs.removeprefix("model.")
    ours = bare.replace("midlayer.", "layers.0.")
    if bare != theirs:
        if ours != bare:
            return ours, "model.midlayer.* -> layers.0.*"
        return ours, "model.* -> without the prefix"
    return ours, "midlayer.* -> layers.0.*" if ours != bare else ""


def common_dtype(tensors: dict[str, Tensor], findings: Findings) -> str | None:
    """The dtype that holds every weight without rounding: theirs if they have one, else float32."""
    weights = [tensor for name, tensor in tensors.items() if name not in ("d2t", "t2d")]
    kinds = {str(tensor.dtype).removeprefix("torch.") for tensor in weights}
    foreign = kinds - set(DTYPES)
    if foreign or not kinds:
        found = ", ".join(sorted(foreign)) or "no weights"
        findings.fault("weights", found, f"tensors in {', '.join(DTYPES)}", "fetch the head in one of these")
        return None
    if len(kinds) == 1:
        return kinds.pop()
    findings.change("dtype of the weights", ", ".join(sorted(kinds)), "float32, so that none is rounded")
    return "float32"


def settle_placeholder(tensors: dict[str, Tensor], width: int, findings: Findings) -> None:
    """`mask_hidden` as [1, 1, width]: so vLLM views it in any shape. Another size is left to the checks."""
    state, shape = tensors.get("mask_hidden"), [1, 1, width]
    if state is not None and list(state.shape) != shape and state.numel() == math.prod(shape):
        findings.change("mask_hidden", f"shape {list(state.shape)}", str(shape))
        tensors["mask_hidden"] = state.reshape(shape)


def settle_vocabulary(
    tensors: dict[str, Tensor], vocab_size: int, draft_vocab_size: int, findings: Findings
) -> None:
    """Proves the maps against each other, and leaves in `tensors` what the head needs of them.

    Of a reduced vocabulary that is d2t, int64 and rising; of a full one nothing. Shapes and range of d2t
    are left to the checks.
    """
    t2d, offsets = tensors.pop("t2d", None), tensors.get("d2t")
    if offsets is not None and offsets.dtype == torch.int32:
        findings.change("d2t", "int32", "int64")
        offsets = tensors["d2t"] = offsets.long()
    if offsets is None or offsets.dtype != torch.int64 or offsets.ndim != 1:
        if t2d is not None:
            _t2d(t2d, None if vocab_size != draft_vocab_size else range(vocab_size), vocab_size, findings)
        return
    ids = [index + offset for index, offset in enumerate(offsets.tolist())]
    if t2d is not None:
        _t2d(t2d, ids, vocab_size, findings)
    if draft_vocab_size == vocab_size:
        del tensors["d2t"]
        moved = int((offsets != 0).sum())
        if moved or len(ids) != vocab_size:
            found = f"{len(ids):,} offsets, {moved:,} of them not zero, beside a full vocabulary"
            if offsets.tolist() == list(range(len(ids))):
                found = "target ids where offsets belong, beside a full vocabulary"
            wanted = f"{vocab_size:,} zeros or none (draft_vocab_size = vocab_size), target id = i + d2t[i]"
            findings.fault("d2t", found, wanted, OWN_TARGET)
        else:
            findings.change("d2t", f"{vocab_size:,} zeros", "none: with a full vocabulary vLLM refuses it")
        return
    head = tensors.get("lm_head.weight")
    unsorted = sum(after < before for before, after in pairwise(ids))
    sound = len(ids) == draft_vocab_size == len(set(ids)) and head is not None and len(head) == len(ids)
    if unsorted and sound and head is not None and all(0 <= token < vocab_size for token in ids):
        order = sorted(range(len(ids)), key=ids.__getitem__)
        tensors["lm_head.weight"] = head[order]
        tensors["d2t"] = torch.tensor([ids[row] - rank for rank, row in enumerate(order)])
        findings.change("d2t and lm_head.weight", "draft ids in another order", "rising target ids")


def _t2d(t2d: Tensor, ids: object, vocab_size: int, findings: Findings) -> None:
    """t2d against the ids that d2t names; None: there is no d2t to hold it against."""
    if ids is None:
        return  # the missing d2t is a fault already
    assert isinstance(ids, (list, range))
    marked = t2d.flatten().nonzero().flatten().tolist()
    if t2d.numel() != vocab_size or not set(t2d.flatten().unique().tolist()) <= {0, 1}:
        found = f"{t2d.dtype}, shape {list(t2d.shape)}"
        findings.fault("t2d", found, f"{vocab_size:,} times true or false", OWN_TARGET)
    elif marked != sorted(ids):
        apart = set(marked) ^ set(ids)
        found = f"{len(marked):,} draftable tokens, {len(apart):,} of them other than d2t's"
        wanted = f"the same as d2t's (it differs at {brief(sorted(apart)[:4])})"
        findings.fault("t2d", found, wanted, "the two maps are of different heads, or d2t holds no offsets")
    else:
        findings.change("t2d", f"{vocab_size:,} marks, equal to d2t's", "left out: vLLM ignores it")
