"""Twins whose weights are stored as gpt-oss (MXFP4) and Qwen3-Coder-FP8 store theirs, from known values.

MXFP4   `X_blocks` [.., G, 16] uint8: 32 numbers a block, the first of a pair in the low half of a byte
        `X_scales` [.., G]     uint8: the block's exponent of 2, plus 127
FP8     `X` [out, in] e4m3 and `X_scale_inv` [out / B, in / B] float32: each square block times its scale
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
GROUP, SQUARE = 32, 16
SECTIONS: dict[str, dict[str, Any]] = {
    "mxfp4": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": ["model.layers.*.self_attn", "model.layers.*.mlp.router", "lm_head"],
    },
    "fp8": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [SQUARE, SQUARE],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate", "model.layers.0.input_layernorm"],
    },
}


def quantised(folder: Path, method: str) -> tuple[Path, Path]:
    """Beside the twin of `folder`: one quantised by `method`, and one that holds the same numbers widened."""
    stored, widened = {}, {}
    for name, tensor in load_file(folder / "model.safetensors").items():
        parts = {"mxfp4": _mxfp4, "fp8": _fp8}[method](name, tensor)
        widened[name] = parts.pop("", tensor)
        stored |= parts or {name: tensor}
    assert len(stored) > len(widened), "nothing was quantised"
    made: list[Path] = []
    for label, tensors in ((method, stored), ("widened", widened)):
        made.append(folder.with_name(f"{folder.name}-{label}"))
        shutil.copytree(folder, made[-1])
        save_file(tensors, made[-1] / "model.safetensors", metadata={"format": "pt"})
    set_quantisation(made[0], SECTIONS[method])
    return made[0], made[1]


def set_quantisation(folder: Path, section: dict[str, Any]) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": section}))


def _mxfp4(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """Experts [E, in, out], stored transposed; key "": the numbers that the stored ones stand for."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return {}
    groups = tensor.transpose(1, 2).unflatten(-1, (-1, GROUP))  # [E, out, G, 32]
    exponent = (groups.abs().amax(-1) / 6).log2().ceil()
    codes = (groups / exponent.exp2()[..., None])[..., None].sub(FP4).abs().argmin(-1)
    numbers = (FP4[codes] * exponent.exp2()[..., None]).flatten(-2).transpose(1, 2).contiguous()
    blocks = (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8)
    return {"": numbers, f"{name}_blocks": blocks, f"{name}_scales": (exponent + 127).to(torch.uint8)}


def _fp8(name: str, tensor: Tensor) -> dict[str, Tensor]:
    """The matrices [out, in] of attention, MLP and experts."""
    if not name.endswith("_proj.weight"):
        return {}
    squares = tensor.unflatten(1, (-1, SQUARE)).unflatten(0, (-1, SQUARE))  # [out/B, B, in/B, B]
    scale = squares.abs().amax((1, 3), keepdim=True) / 448
    codes = (squares / scale).to(torch.float8_e4m3fn)
    numbers = (codes.float() * scale).flatten(2).flatten(0, 1)
    return {
        "": numbers,
        name: codes.flatten(2).flatten(0, 1),
        f"{name}_scale_inv": scale[:, 0, :, 0].contiguous(),
    }
