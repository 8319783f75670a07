"""The parts that are read without the target are the loaded target's, to the last bit."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle_train.head.initialise import COPIED
from peagle_train.target.adapter import Target
from peagle_train.target.parts import INDEX, StoredParts, load_parts
from peagle_train.twin.models import TWINS


@pytest.fixture(scope="module", params=TWINS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("parts")
    TWINS[request.param](path)
    return path


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_they_are_the_loaded_targets(folder: Path, dtype: str) -> None:
    parts = load_parts(folder, dtype=dtype, layers=2, wanted=COPIED)
    target = Target.load(folder, dtype=dtype, device="cpu")
    assert isinstance(parts, StoredParts), "it loaded the whole target"
    assert (parts.facts, parts.end_token_ids) == (target.facts, target.end_token_ids)
    for name in ("embedding_table", "head_table", "final_norm_weight"):
        ours, theirs = getattr(parts, name)(), getattr(target, name)()
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs), name
    for count in (1, 2):
        for ours, theirs in zip(parts.last_layers(count), target.last_layers(count), strict=True):
            assert set(ours) == set(theirs) & COPIED and "self_attn.q_proj.weight" in ours
            assert all(torch.equal(tensor, theirs[name]) for name, tensor in ours.items())
    last = torch.randn(3, target.facts.hidden_size, generator=torch.Generator().manual_seed(0))
    rows = torch.tensor([5, 9, 40])
    for ids in (None, rows):
        assert torch.equal(parts.output_head(ids)(last), target.output_head(ids)(last))
    assert not any(parameter.requires_grad for parameter in parts.output_head(rows).parameters())


def test_only_what_is_needed_is_read(folder: Path) -> None:
    with patch("peagle_train.target.parts.Target.load", side_effect=AssertionError("the target was loaded")):
        parts = load_parts(folder, dtype="float32", layers=1, wanted=["input_layernorm.weight"])
    assert [list(layer) for layer in parts.last_layers(1)] == [["input_layernorm.weight"]]


@pytest.mark.parametrize("how", ["another name", "a narrow type"])
def test_what_cannot_be_read_by_name_comes_from_the_loaded_target(tmp_path: Path, how: str) -> None:
    folder = TWINS["llama"](tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.norm.weight"
    if how == "another name":
        del tensors[name]
    else:
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with patch("peagle_train.target.parts.Target.load", return_value="loaded") as load:
        assert load_parts(folder, dtype="float32", layers=1, wanted=COPIED) == "loaded"  # type: ignore[comparison-overlap]
    load.assert_called_once()


def test_of_several_files_the_right_one_is_opened(tmp_path: Path) -> None:
    folder = TWINS["qwen3"](tmp_path)
    whole = load_parts(folder, dtype="float32", layers=2, wanted=COPIED)
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(folder)
    (folder / "model.safetensors").unlink()
    model.save_pretrained(folder, max_shard_size="60KB")
    assert (folder / INDEX).is_file() and len(list(folder.glob("*.safetensors"))) > 2
    parts = load_parts(folder, dtype="float32", layers=2, wanted=COPIED)
    assert isinstance(parts, StoredParts) and torch.equal(parts.head_table(), whole.head_table())
    for ours, theirs in zip(parts.last_layers(2), whole.last_layers(2), strict=True):
        assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
