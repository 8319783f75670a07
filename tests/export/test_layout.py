"""What is exported is what was trained, in vLLM's words, or nothing at all."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle_train.errors import PeagleError
from peagle_train.export.checks import HeadFault, check_head
from peagle_train.export.contract import DTYPES
from peagle_train.export.layout import export_head, read_head
from peagle_train.head.session import DraftSession
from peagle_train.target.facts import KVLayer
from tests.export.conftest import FACTS, small_head
from tests.head.toys import LAYOUTS


def logits(head):
    tokens = torch.tensor([5, 9, 2, 7])
    aux = torch.linspace(-1, 1, 4 * head.config.aux_width).view(4, -1)
    return DraftSession(head).draft(tokens, aux, 4)[1]


@pytest.mark.parametrize("format", ["plain", "speculators"])
@pytest.mark.parametrize("own", [True, False])
@pytest.mark.parametrize("draft_vocab_size", [40, 96])
def test_a_head_comes_back_bit_for_bit(tmp_path: Path, format: str, own: bool, draft_vocab_size: int) -> None:
    head = small_head(own=own, draft_vocab_size=draft_vocab_size)
    report = export_head(head, tmp_path / "head", target=FACTS, dtype="float32", format=format)
    assert report.config == head.config
    assert report.format == format
    back = read_head(tmp_path / "head", shared_embeddings=None if own else head.embed_tokens.weight)
    assert back.config == head.config
    for name, tensor in head.state_dict().items():
        assert torch.equal(back.state_dict()[name], tensor), name
    assert torch.equal(back.draft_token_ids, head.draft_token_ids)
    assert torch.equal(logits(back), logits(head))


EAGLE3 = {"method": "eagle3", "mask_token_id": None}
OPTIONS = {
    **{name: changes for name, changes in LAYOUTS.items() if "aux_layers" not in changes},
    "two aux layers": {"aux_layers": (0, 4)},
    "five aux layers": {"aux_layers": (0, 1, 2, 3, 4)},
    "eagle3": EAGLE3,
    "eagle3, norm output": {**EAGLE3, "norm_output": True, "drafter": "qwen3"},
}


@pytest.mark.parametrize("format", ["plain", "speculators"])
@pytest.mark.parametrize("name", OPTIONS)
def test_every_layout_comes_back_bit_for_bit(tmp_path: Path, name: str, format: str) -> None:
    changes = dict(OPTIONS[name])
    shape = {
        "own": changes.pop("own_embeddings", True),
        "draft_vocab_size": changes.pop("draft_vocab_size", 40),
        "layers": changes.pop("num_layers", 2),
    }
    if "rope" in changes:
        changes["max_position_embeddings"] = 64
    head = small_head(**shape, **changes)
    target = replace(FACTS, max_position_embeddings=head.config.max_position_embeddings)
    export_head(head, tmp_path / "head", target=target, dtype="float32", format=format)
    back = read_head(tmp_path / "head", shared_embeddings=None if shape["own"] else head.embed_tokens.weight)
    assert back.config == head.config
    assert back.state_dict().keys() == head.state_dict().keys()
    for tensor, value in head.state_dict().items():
        assert torch.equal(back.state_dict()[tensor], value), tensor
    assert torch.equal(logits(back), logits(head))
    (tmp_path / "head" / "export.json").unlink()  # a stranger's head tells the same by itself
    assert check_head(tmp_path / "head").config == head.config


def test_what_serving_needs_beside_the_target_is_said(tmp_path: Path) -> None:
    """Two full layers beside four and four: vLLM would deal them out to two groups."""
    hybrid = replace(FACTS, kv_layers=(KVLayer(8, 2, 8), KVLayer(None, 2, 8)) * 4)
    report = export_head(small_head(), tmp_path / "head", target=hybrid)
    assert report.flags == ("--disable-hybrid-kv-cache-manager",)
    assert check_head(tmp_path / "head").flags == report.flags  # export.json knows the target's layers
    assert ("serving needs", report.flags[0]) in report.rows()
    windows = {"layer_types": ("sliding_attention", "full_attention"), "sliding_window": 16}
    with pytest.raises(HeadFault, match="sliding_window: windows of 8 and 16 in head and target"):
        export_head(small_head(**windows), tmp_path / "other", target=hybrid)
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_the_export_dtype_rounds_and_nothing_else(tmp_path: Path, dtype: str) -> None:
    head = small_head()
    export_head(head, tmp_path / "head", target=FACTS, dtype=dtype)
    stored = load_file(tmp_path / "head" / "model.safetensors")
    for name, tensor in stored.items():
        expected = head.state_dict()[name]
        assert torch.equal(tensor, expected if name == "d2t" else expected.to(DTYPES[dtype])), name
    assert stored["d2t"].dtype == torch.int64
    assert json.loads((tmp_path / "head" / "config.json").read_text())["dtype"] == dtype


def test_config_json_holds_what_vllm_reads(exported) -> None:
    config = json.loads((exported() / "config.json").read_text())
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["model_type"] == "llama"
    assert (config["vocab_size"], config["draft_vocab_size"]) == (96, 40)
    assert config["ptd_token_id"] == config["pard_token"] == 3
    assert config["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [1, 2, 4]
    assert config["num_aux_hidden_states"] == 3
    assert config["rope_theta"] == 30000.0
    assert config["max_position_embeddings"] == 512
    assert config["norm_before_residual"] is False


def test_the_speculators_config_names_target_method_and_k(tmp_path: Path) -> None:
    export_head(
        small_head(),
        tmp_path / "head",
        target=FACTS,
        format="speculators",
        target_reference="/models/target",
        speculative_tokens=7,
    )
    config = json.loads((tmp_path / "head" / "config.json").read_text())
    assert "model_type" not in config  # vLLM recognises the format only without it
    assert config["speculators_model_type"] == "peagle"
    assert config["mask_token_id"] == 3
    serving = config["speculators_config"]
    assert serving["verifier"]["name_or_path"] == "/models/target"
    assert serving["proposal_methods"][0]["speculative_tokens"] == 7
    assert config["transformer_layer_config"]["num_aux_hidden_states"] == 3


def test_tensors_are_vllms_and_complete(exported) -> None:
    stored = load_file(exported() / "model.safetensors")
    assert stored["fc.weight"].shape == (32, 96)
    assert stored["mask_hidden"].numel() == 96
    assert stored["layers.0.self_attn.q_proj.weight"].shape == (32, 64)  # [embedding; hidden]
    assert stored["layers.1.self_attn.q_proj.weight"].shape == (32, 32)
    assert "layers.0.hidden_norm.weight" in stored
    assert "layers.1.hidden_norm.weight" not in stored
    offsets = stored["d2t"]
    ids = torch.arange(40) + offsets
    assert torch.equal(ids, small_head().draft_token_ids)


def test_shared_embeddings_and_a_full_vocabulary_leave_no_tensor(exported) -> None:
    stored = load_file(exported(own=False, draft_vocab_size=96) / "model.safetensors")
    assert "embed_tokens.weight" not in stored
    assert "d2t" not in stored


def test_a_shared_head_is_read_with_its_targets_table_or_not_at_all(exported) -> None:
    directory = exported(own=False)
    with pytest.raises(PeagleError, match="shares its target's embeddings"):
        read_head(directory)
    with pytest.raises(PeagleError, match=r"got \[96, 31\]"):
        read_head(directory, shared_embeddings=torch.zeros(96, 31))


def test_provenance_and_checksums_are_recorded(tmp_path: Path) -> None:
    report = export_head(small_head(), tmp_path / "head", target=FACTS, extra={"run": "r", "step": 7})
    record = json.loads((tmp_path / "head" / "export.json").read_text())
    assert record["provenance"] == {"run": "r", "step": 7}
    assert record["sha256"]["model.safetensors"] == report.weights_sha256
    assert record["target"]["model"] == "owner/target"
    assert record["head"]["aux_layers"] == [1, 2, 4]


def test_a_head_that_is_not_finite_never_appears(tmp_path: Path) -> None:
    head = small_head()
    with torch.no_grad():
        head.layers[1].mlp.up_proj.weight[0, 0] = float("nan")
    with pytest.raises(HeadFault, match=r"up_proj.weight: 1 of 1,536 values are NaN"):
        export_head(head, tmp_path / "head", target=FACTS)
    assert list(tmp_path.iterdir()) == []


def test_a_weight_beyond_the_dtypes_range_never_appears(tmp_path: Path) -> None:
    head = small_head()
    with torch.no_grad():
        head.norm.weight[0] = 1e6  # infinite in float16
    with pytest.raises(HeadFault, match=r"norm.weight: 1 of 32 values are NaN or infinite"):
        export_head(head, tmp_path / "head", target=FACTS, dtype="float16")


def test_a_failed_export_leaves_the_earlier_one(exported, tmp_path: Path) -> None:
    directory = exported()
    before = (directory / "model.safetensors").read_bytes()
    with pytest.raises(HeadFault, match="max_position_embeddings: 511; expected at least the target's 512"):
        export_head(small_head(max_position_embeddings=511), directory, target=FACTS)
    assert (directory / "model.safetensors").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["head"]


def test_a_head_without_our_record_is_read_too(exported) -> None:
    """A head of another maker: config.json and model.safetensors, mask_hidden flat."""
    directory = exported()
    (directory / "export.json").unlink()
    tensors = load_file(directory / "model.safetensors")
    tensors["mask_hidden"] = tensors["mask_hidden"].flatten()
    save_file(tensors, directory / "model.safetensors")
    report = check_head(directory, FACTS)
    assert torch.equal(logits(read_head(directory)), logits(small_head()))
    assert report.target == "owner/target"
    assert check_head(directory).target is None
