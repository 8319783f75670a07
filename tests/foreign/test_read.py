"""Heads as they are published read back as the heads they were made of, bit for bit, or are refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle_train.foreign.config import PLAIN_DEFAULTS
from peagle_train.foreign.keys import QWEN3_WINDOW, ROPE_THETA
from peagle_train.foreign.read import ForeignHead, read_foreign
from peagle_train.head.config import FULL, SLIDING
from peagle_train.head.model import DrafterHead
from peagle_train.head.rope import Rope
from peagle_train.head.session import DraftSession
from tests.export.conftest import FACTS, small_head
from tests.foreign import publish
from tests.foreign.publish import drop, edit, edit_tensors, put
from tests.foreign.test_refusals import faults_of

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def logits(head: DrafterHead) -> torch.Tensor:
    """Of a fixed context; an eagle3 head drafts one token, which takes no step back."""
    head = head.float()
    tokens, k = torch.tensor([5, 9, 2, 7]), 4 if head.config.method == "peagle" else 1
    aux = torch.linspace(-1, 1, 4 * head.config.aux_width).view(4, -1)
    return DraftSession(head).draft(tokens, aux, k)[1]


def same(foreign: ForeignHead, head: DrafterHead, dtype: torch.dtype) -> None:
    """The head that was read is the one that was published, rounded as it was published."""
    rounded = head.to(dtype)
    assert foreign.head.config == head.config
    theirs, ours = foreign.head.state_dict(), rounded.state_dict()
    for name, tensor in ours.items():
        if name != "embed_tokens.weight" or head.config.own_embeddings:
            assert torch.equal(theirs[name], tensor), name
    if not head.config.own_embeddings:
        foreign.head.embed_tokens.weight.data = rounded.embed_tokens.weight.data
    assert torch.equal(logits(foreign.head), logits(rounded))


def found(foreign: ForeignHead) -> dict[str, tuple[str, str]]:
    return {change.what: (change.found, change.now) for change in foreign.changes}


def test_the_amazon_layout(tmp_path: Path) -> None:
    head = small_head(draft_vocab_size=96, layers=4)
    foreign = read_foreign(publish.amazon(head, tmp_path / "theirs"), FACTS)
    same(foreign, head, torch.bfloat16)
    assert (foreign.dtype, foreign.format, foreign.k) == ("bfloat16", "plain", None)
    changes = found(foreign)
    assert changes["d2t"] == ("96 zeros", "none: with a full vocabulary vLLM refuses it")
    assert "equal to d2t's" in changes["t2d"][0]
    assert changes["10 tensors"] == ("midlayer.*", "layers.0.*")
    assert changes["ptd_token_id"] == ("3", "pard_token and ptd_token_id")
    assert set(foreign.sha256) == {CONFIG, WEIGHTS}


@pytest.mark.parametrize("own", [True, False])
def test_the_speculators_layout(tmp_path: Path, own: bool) -> None:
    head = small_head(own=own)
    foreign = read_foreign(publish.speculators(head, tmp_path / "theirs"), FACTS)
    same(foreign, head, torch.bfloat16)
    assert (foreign.format, foreign.k) == ("speculators", 6)
    # What is left out has the default of format and method: here the bare state.
    (off,) = (change for change in foreign.changes if "norm_before_residual" in change.what)
    assert off.now == "neutral, vLLM's default"


def test_speculators_eagle3_starts_its_residual_from_the_normed_state(tmp_path: Path) -> None:
    head = small_head(method="eagle3", mask_token_id=None, layers=1, norm_before_residual=True)
    foreign = read_foreign(publish.speculators(head, tmp_path / "theirs"), FACTS)
    same(foreign, head, torch.bfloat16)
    assert found(foreign)["norm_before_residual"] == ("left out", "True, vLLM's default")


def test_a_plain_eagle3_head_needs_its_layers_named(tmp_path: Path) -> None:
    head = small_head(
        own=False, method="eagle3", mask_token_id=None, layers=1, rope=Rope(ROPE_THETA), aux_layers=(1, 2, 3)
    )
    theirs = publish.eagle3(head, tmp_path / "theirs")
    (fault,) = faults_of(theirs)
    assert fault.startswith("config.json: eagle_aux_hidden_state_layer_ids: missing")
    assert "its default, [2, 2, 1] here" in fault and "--aux-layers I,J,K" in fault
    foreign = read_foreign(theirs, FACTS, aux_layers=[1, 2, 3])
    same(foreign, head, torch.float16)
    changes = found(foreign)
    assert changes["max_position_embeddings"] == ("128", "512, the target's, as vLLM raises it")
    assert changes["rope_theta"] == ("left out", "10000.0, vLLM's default")
    assert changes["head_dim"] == ("left out", "8, vLLM's default")
    assert changes["eagle_aux_hidden_state_layer_ids"] == ("left out", "[1, 2, 3], as you said")


@pytest.mark.parametrize(
    "shape",
    [
        {"norm_before_residual": True, "norm_before_fc": True, "fc_norm": True},
        {"attention_bias": True, "norm_output": True},
        {"aux_layers": (0, 2), "num_key_value_heads": 4},
        {"rope": Rope(30000.0, "yarn", factor=4.0, original_max_position_embeddings=128, truncate=False)},
        {"layer_types": (SLIDING, FULL), "sliding_window": 5},
    ],
    ids=str,
)
def test_every_option_is_read_from_a_plain_config(tmp_path: Path, shape: dict[str, Any]) -> None:
    head = small_head(**shape)
    theirs = publish.amazon(head, tmp_path / "theirs")
    config = head.config
    edit(theirs, put(**{key: value for key, value in shape.items() if isinstance(value, bool)}))
    if config.rope.scaling:
        edit(theirs, put(rope_scaling={"type": config.rope.rope_type, **config.rope.scaling}))
    if config.sliding_window:
        kinds = [*config.layer_types, FULL, FULL]  # as copied from the target's config: vLLM reads two
        edit(theirs, put(layer_types=kinds, sliding_window=config.sliding_window))
    same(read_foreign(theirs, FACTS), head, torch.bfloat16)


def test_a_qwen3_drafter_by_its_class(tmp_path: Path) -> None:
    head = small_head(drafter="qwen3")
    theirs = publish.amazon(head, tmp_path / "theirs")
    edit(theirs, put(architectures=["PeagleQwen3ForCausalLM"], model_type="qwen3", sliding_window=7))
    foreign = read_foreign(theirs, FACTS)
    same(foreign, head, torch.bfloat16)
    assert found(foreign)["architectures"] == ("PeagleQwen3ForCausalLM", "Eagle3Qwen3ForCausalLM")
    assert found(foreign)["sliding_window"][0] == "7"  # without use_sliding_window transformers drops it
    edit(theirs, put(use_sliding_window=True, max_window_layers=1))
    windowed = read_foreign(theirs, FACTS).head.config
    assert (windowed.layer_types, windowed.sliding_window) == ((FULL, SLIDING), 7)


def test_a_qwen3_speculators_head(tmp_path: Path) -> None:
    head = small_head(drafter="qwen3")
    same(read_foreign(publish.speculators(head, tmp_path / "theirs"), FACTS), head, torch.bfloat16)


def test_what_transformers_fills_in_is_what_we_fill_in() -> None:
    from transformers import LlamaConfig, Qwen3Config

    for model_type, made in (("llama", LlamaConfig()), ("qwen3", Qwen3Config())):
        for key, value in PLAIN_DEFAULTS[model_type].items():
            assert getattr(made, key) == value
        assert made.rope_parameters["rope_theta"] == ROPE_THETA
    llama = LlamaConfig(hidden_size=48, num_attention_heads=6)
    assert (llama.head_dim, llama.num_key_value_heads) == (8, 6)
    windowed = Qwen3Config(use_sliding_window=True, num_hidden_layers=30)
    assert (windowed.sliding_window, windowed.layer_types.index(SLIDING)) == QWEN3_WINDOW


def test_shards_another_file_name_and_a_prefix(tmp_path: Path) -> None:
    head = small_head()
    theirs = publish.amazon(head, tmp_path / "theirs", torch.float32)
    tensors = load_file(theirs / WEIGHTS)
    tensors = {name if name in ("d2t", "t2d") else f"model.{name}": t for name, t in tensors.items()}
    tensors["model.midlayer.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    (theirs / WEIGHTS).unlink()
    save_file(tensors, theirs / "drafter.safetensors")
    same(read_foreign(theirs, FACTS), head, torch.float32)

    (theirs / "drafter.safetensors").unlink()
    names = sorted(tensors)
    shards = {"a.safetensors": names[:9], "b.safetensors": names[9:]}
    for file, held in shards.items():
        save_file({name: tensors[name] for name in held}, theirs / file)
    index = {"weight_map": {name: file for file, held in shards.items() for name in held}}
    (theirs / "model.safetensors.index.json").write_text(json.dumps(index))
    foreign = read_foreign(theirs, FACTS)
    same(foreign, head, torch.float32)
    assert found(foreign)["weights"] == ("2 files", "one")
    assert set(foreign.sha256) == {CONFIG, *shards}

    (theirs / "b.safetensors").unlink()
    assert faults_of(theirs)[0].startswith("b.safetensors: missing")
    (theirs / "model.safetensors.index.json").unlink()
    (theirs / "c.safetensors").write_bytes((theirs / "a.safetensors").read_bytes())
    assert faults_of(theirs)[0].startswith("weights: a.safetensors, c.safetensors; expected one")


def test_mixed_dtypes_are_widened_never_rounded(tmp_path: Path) -> None:
    head = small_head()
    theirs = publish.amazon(head, tmp_path / "theirs")
    edit_tensors(theirs, lambda t: t.update({"norm.weight": head.norm.weight.detach().clone()}))
    foreign = read_foreign(theirs, FACTS)
    assert foreign.dtype == "float32"
    assert torch.equal(foreign.head.norm.weight, head.norm.weight)
    assert torch.equal(foreign.head.fc.weight, head.fc.weight.bfloat16().float())


def test_a_map_in_another_order_drafts_the_same_tokens(tmp_path: Path) -> None:
    """Ids that do not rise are put in order together with lm_head's rows: training searches them."""
    head = small_head()
    theirs = publish.amazon(head, tmp_path / "theirs", torch.float32)
    order = torch.randperm(40, generator=torch.Generator().manual_seed(1))

    def shuffle(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["lm_head.weight"][order].contiguous()
        tensors["d2t"] = (head.draft_token_ids[order] - torch.arange(40)).int()

    edit_tensors(theirs, shuffle)
    foreign = read_foreign(theirs, FACTS)
    same(foreign, head, torch.float32)
    assert found(foreign)["d2t"] == ("int32", "int64")


@pytest.mark.parametrize(
    "places",
    [
        {"mask_token_id": 3},
        {"pard_token": 3},
        {"dspark_noise_token_id": 3},
        {"dflash_config": {"mask_token_id": 3}},
        {"ptd_token_id": 3, "pard_token": 3, "mask_token_id": None},
    ],
    ids=str,
)
def test_the_mask_token_wherever_vllm_looks(tmp_path: Path, places: dict[str, Any]) -> None:
    theirs = publish.amazon(small_head(), tmp_path / "theirs")
    edit(theirs, drop("ptd_token_id"))
    edit(theirs, put(**places))
    assert read_foreign(theirs, FACTS).head.config.mask_token_id == 3


@pytest.mark.parametrize(
    "places",
    [
        {"eagle_aux_hidden_state_layer_ids": [4, 1, 2], "eagle_config": None},
        {"eagle_aux_hidden_state_layer_ids": [1, 2, 4], "eagle_config": {"norm_before_fc": False}},
        {"dflash_config": {"target_layer_ids": [0, 1, 3]}, "eagle_config": None},
        {"num_aux_hidden_states": 3},
    ],
    ids=str,
)
def test_the_aux_layers_wherever_vllm_looks(tmp_path: Path, places: dict[str, Any]) -> None:
    theirs = publish.amazon(small_head(), tmp_path / "theirs")
    edit(theirs, put(**places))
    assert read_foreign(theirs, FACTS).head.config.aux_layers == (1, 2, 4)


def test_theta_in_any_place_and_tied_embeddings(tmp_path: Path) -> None:
    head = small_head()
    theirs = publish.amazon(head, tmp_path / "theirs")
    edit(theirs, drop("rope_theta"))
    edit(
        theirs, put(rope_parameters={"rope_theta": 30000.0, "rope_type": "default"}, tie_word_embeddings=True)
    )
    foreign = read_foreign(theirs, FACTS)
    same(foreign, head, torch.bfloat16)
    assert found(foreign)["tie_word_embeddings"][0] == "true"
    edit(theirs, put(rope_parameters={"factor": 2.0, "rope_type": "linear"}, rope_theta=5.0))
    assert read_foreign(theirs, FACTS).head.config.rope == Rope(5.0, "linear", factor=2.0)


def test_a_longer_target_raises_the_context(tmp_path: Path) -> None:
    theirs = publish.amazon(small_head(), tmp_path / "theirs")
    longer = replace(FACTS, max_position_embeddings=4096)
    assert read_foreign(theirs, longer).head.config.max_position_embeddings == 4096


@pytest.mark.parametrize("shape", [(96,), (1, 96), (3, 32)])
def test_a_placeholder_state_of_any_shape(tmp_path: Path, shape: tuple[int, ...]) -> None:
    head = small_head()
    theirs = publish.amazon(head, tmp_path / "theirs")
    edit_tensors(theirs, lambda t: t.update(mask_hidden=t["mask_hidden"].reshape(shape)))
    same(read_foreign(theirs, FACTS), head, torch.bfloat16)
