"""Every row of docs/heads.md, "found | becomes", is among the changes when it happens."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle_train.foreign.read import read_foreign
from tests.export.conftest import FACTS, small_head
from tests.foreign import publish
from tests.foreign.publish import drop, edit, edit_tensors, put

WEIGHTS = "model.safetensors"
AUX = "eagle_aux_hidden_state_layer_ids"
Row = list[tuple[Callable[[Path], Any], tuple[str, str]]]


def config(*changes: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    return lambda folder: [edit(folder, change) for change in changes]  # type: ignore[func-returns-value]


def tensors(change: Callable[[dict[str, torch.Tensor]], Any]) -> Callable[[Path], None]:
    return lambda folder: edit_tensors(folder, change)


def prefixed(held: dict[str, torch.Tensor]) -> None:
    for name in [name for name in held if name not in ("d2t", "t2d")]:
        held[f"model.{name}"] = held.pop(name)


def sharded(folder: Path) -> None:
    held = load_file(folder / WEIGHTS)
    (folder / WEIGHTS).unlink()
    files = {name: f"{index % 2}.safetensors" for index, name in enumerate(sorted(held))}
    for file in set(files.values()):
        save_file({name: held[name] for name in files if files[name] == file}, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))


def renamed(folder: Path) -> None:
    (folder / WEIGHTS).rename(folder / "drafter.safetensors")


def reordered(held: dict[str, torch.Tensor]) -> None:
    ids = held["d2t"] + torch.arange(40)
    held["d2t"] = ids.flip(0) - torch.arange(40)
    held["lm_head.weight"] = held["lm_head.weight"].flip(0).contiguous()


def full(folder: Path) -> None:
    """The same head with a full vocabulary in the same folder."""
    for file in folder.iterdir():
        file.unlink()
    folder.rmdir()
    publish.amazon(small_head(draft_vocab_size=96), folder)


def nested(key: str, value: Any) -> Callable[[Path], None]:
    return config(drop("ptd_token_id"), put(**{key: value}))


SHORT = {"rope_type": "default", "rope_theta": 30000.0}
BOTH = "pard_token and ptd_token_id"
# The row's left cell -> what is done to a published head, and the change (what, now) that must be told.
ROWS: dict[str, Row] = {
    "`midlayer.*`, `model.*`, shards, one file of another name": [
        (lambda folder: None, ("10 tensors", "layers.0.*")),
        (tensors(prefixed), ("10 tensors", "layers.0.*")),
        (tensors(prefixed), ("14 tensors", "without the prefix")),
        (sharded, ("weights", "one")),
        (renamed, ("weights", WEIGHTS)),
    ],
    "`d2t` of zeros beside a full vocabulary": [(full, ("d2t", "none: with a full vocabulary"))],
    "`d2t` in another order, or int32": [
        (tensors(reordered), ("d2t and lm_head.weight", "rising target ids")),
        (tensors(lambda held: held.update(d2t=held["d2t"].int())), ("d2t", "int64")),
    ],
    "`t2d`": [(lambda folder: None, ("t2d", "left out: vLLM ignores it"))],
    "a table of RoPE (`rotary_emb.inv_freq`)": [
        (
            tensors(lambda held: held.update({"midlayer.self_attn.rotary_emb.inv_freq": torch.ones(4)})),
            ("midlayer.self_attn.rotary_emb.inv_freq", "left out"),
        )
    ],
    "`mask_hidden` of any shape": [
        (
            tensors(lambda held: held.update(mask_hidden=held["mask_hidden"].reshape(96))),
            ("mask_hidden", "[1, 1, 96]"),
        )
    ],
    "any class of vLLM's Llama and Qwen3 drafters": [
        (config(put(architectures=["PeagleLlamaForCausalLM"])), ("architectures", "LlamaForCausalLMEagle3")),
        (
            config(put(architectures=["LlamaForCausalLMEagle3", "Other"])),
            ("architectures", "LlamaForCausalLMEagle3"),
        ),
    ],
    "the mask token under any of vLLM's five keys": [
        (config(), ("ptd_token_id", BOTH)),
        (nested("pard_token", 3), ("pard_token", BOTH)),
        (nested("mask_token_id", 3), ("mask_token_id", BOTH)),
        (nested("dspark_noise_token_id", 3), ("dspark_noise_token_id", BOTH)),
        (nested("dflash_config", {"mask_token_id": 3}), ("dflash_config.mask_token_id", BOTH)),
    ],
    "aux layers in `eagle_config` or `dflash_config` alone, or in another order": [
        (lambda folder: None, (f"eagle_config.{AUX}", "[1, 2, 4], at the top level and in eagle_config")),
        (
            config(put(eagle_config=None, dflash_config={"target_layer_ids": [0, 1, 3]})),
            ("dflash_config.target_layer_ids", "[1, 2, 4], at the top level"),
        ),
        (config(put(**{AUX: [4, 1, 2]})), (AUX, "[1, 2, 4], the order")),
    ],
    "RoPE in `rope_parameters`, or theta in `rope_scaling`": [
        (config(drop("rope_theta"), put(rope_parameters=SHORT)), ("rope_parameters", "rope_theta")),
        (config(drop("rope_theta"), put(rope_scaling=SHORT)), ("rope_scaling", "rope_theta")),
        (config(put(rope_parameters=SHORT, rope_scaling=SHORT)), ("rope_parameters", "rope_theta")),
    ],
    "windows that no layer uses": [
        (config(put(sliding_window=7)), ("sliding_window", "none")),
        (config(put(layer_types=["full_attention"] * 2)), ("layer_types", "left out")),
    ],
    "a `dtype` other than the weights'": [
        (config(put(torch_dtype="float16")), ("dtype", "bfloat16, as the weights"))
    ],
    "a shorter `max_position_embeddings`": [
        (config(put(max_position_embeddings=128)), ("max_position_embeddings", "512, the target's"))
    ],
    "options and sizes left out": [
        (config(drop("head_dim")), ("head_dim", "8, vLLM's default")),
        (config(drop("hidden_act")), ("norm_before_residual", "neutral, vLLM's default")),
    ],
}
CASES = [(row, number) for row, cases in ROWS.items() for number in range(len(cases))]


def test_the_rows_are_those_of_the_page() -> None:
    page = (Path(__file__).parents[2] / "docs/heads.md").read_text(encoding="utf-8")
    table = page.split("| found | becomes |\n|---|---|\n")[1].split("\n\n")[0]
    assert {re.split(r" \| ", line.removeprefix("| "))[0] for line in table.splitlines()} == ROWS.keys()


@pytest.mark.parametrize("row,number", CASES)
def test_what_the_page_promises_is_told(tmp_path: Path, row: str, number: int) -> None:
    happen, (what, now) = ROWS[row][number]
    theirs = publish.amazon(small_head(), tmp_path / "theirs")
    happen(theirs)
    changes = read_foreign(theirs, FACTS).changes
    assert any(what in change.what and change.now.startswith(now) for change in changes), changes
