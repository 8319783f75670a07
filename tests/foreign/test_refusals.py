"""What is no head, not this target's, or not told in full is refused, all of it at once, with the cure."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle_train.export.checks import HeadFault
from peagle_train.foreign.read import read_foreign
from tests.export.conftest import FACTS, small_head
from tests.foreign import publish
from tests.foreign.publish import drop, edit, edit_tensors, put

CONFIG, WEIGHTS = "config.json", "model.safetensors"


def faults_of(directory: Path) -> list[str]:
    with pytest.raises(HeadFault) as caught:
        read_foreign(directory, FACTS)
    for fault in caught.value.faults:
        assert "; expected " in fault and "export again" not in fault, fault
    return caught.value.faults


CONFIG_FAULTS: dict[str, tuple[Any, str]] = {
    "quantised": (put(quantization_config={"bits": 4}), "quantization_config: present; expected none"),
    "another class": (put(architectures=["DeepseekForCausalLM"]), "architectures: ['DeepseekForCausalLM']"),
    "another type": (put(model_type="gpt_oss"), "model_type: 'gpt_oss'; expected 'llama' or 'qwen3'"),
    "two mask tokens": (put(pard_token=5), "ptd_token_id: 3; expected 5 as in pard_token, which vLLM takes"),
    "a mask token of text": (put(ptd_token_id="3"), "pard_token and ptd_token_id: ['3', '3']"),
    "no mask token": (drop("ptd_token_id"), "pard_token and ptd_token_id: missing; expected the mask"),
    "a mask token out of range": (put(ptd_token_id=96), "pard_token: 96; expected an id below vocab_size 96"),
    "another target's vocabulary": (put(vocab_size=97), "vocab_size: 97; expected 96, the target's"),
    "another target's width": (
        put(target_hidden_size=64), "target_hidden_size: 64; expected 32, the target's hidden_size"
    ),
    "a deeper target": (
        put(eagle_aux_hidden_state_layer_ids=[1, 2, 5]),
        "eagle_aux_hidden_state_layer_ids: [5] out of range; expected 0..4",
    ),
    "another count of layers": (put(num_aux_hidden_states=4), "num_aux_hidden_states: 4; expected 3"),
    "no size": (drop("intermediate_size"), "intermediate_size: missing; expected a whole number"),
    "two thetas": (
        put(rope_parameters={"rope_theta": 9.0}), "rope_theta: 30000.0; expected 9.0 as in rope_parameters"
    ),
    "M-RoPE": (
        put(rope_scaling={"type": "default", "mrope_section": [1, 1, 2]}), "rope_scaling: {'mrope_section'"
    ),
    "a short yarn": (
        put(rope_scaling={"type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}),
        "max_position_embeddings: 512; expected at most 256",
    ),
    "partial RoPE": (put(partial_rotary_factor=0.5), "partial_rotary_factor: 0.5; expected none"),
    "another activation": (put(hidden_act="gelu"), "hidden_act: 'gelu'; expected 'silu'"),
    "scaled logits": (put(logit_scale=0.5), "logit_scale: 0.5; expected 1.0"),
    "EAGLE 1": (
        put(eagle_config={"use_aux_hidden_state": False}),
        "eagle_config.use_aux_hidden_state: False; expected true",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIG_FAULTS)
def test_a_config_that_cannot_be_served_here_is_refused(tmp_path: Path, name: str) -> None:
    change, expected = CONFIG_FAULTS[name]
    theirs = publish.amazon(small_head(), tmp_path / "theirs")
    edit(theirs, change)
    faults = faults_of(theirs)
    assert any(fault.startswith(f"config.json: {expected}") or expected in fault for fault in faults), faults
    assert len({fault.partition("; expected")[0] for fault in faults}) == len(faults)


def _ids(t: dict[str, torch.Tensor]) -> None:
    t["d2t"] = t["d2t"] + torch.arange(40)


TENSOR_FAULTS: dict[str, tuple[Any, str]] = {
    "no lm_head": (drop("lm_head.weight"), "model.safetensors: lm_head.weight: missing"),
    "no norm": (drop("norm.weight"), "norm.weight: missing; expected shape [32]"),
    "no placeholder": (drop("mask_hidden"), "mask_hidden: missing"),
    "an unknown tensor": (put(extra=torch.ones(3)), "extra: unknown tensor"),
    "fc of another width": (put(**{"fc.weight": torch.ones(32, 64)}), "shape [32, 64]; expected [32, 96]"),
    "layer 0 twice": (
        put(**{"layers.0.hidden_norm.weight": torch.ones(32)}), "a second tensor; expected one layers.0."
    ),
    "NaN": (lambda t: t["norm.weight"].fill_(float("nan")), "norm.weight: 32 of 32 values are NaN"),
    "ids instead of offsets": (_ids, "these look like target ids"),
    "maps of two heads": (lambda t: t["t2d"].logical_not_(), "t2d: 56 draftable tokens, 96 of them other"),
    "a short t2d": (put(t2d=torch.ones(95, dtype=torch.bool)), "torch.bool, shape [95]; expected 96 times"),
    "a packed weight": (put(**{"norm.weight": torch.ones(32, dtype=torch.int8)}), "int8; expected"),
    "no d2t": (drop("d2t"), "d2t: missing; expected shape [40]"),
    "floats as d2t": (lambda t: t.update(d2t=t["d2t"].float()), "d2t: dtype torch.float32; expected"),
}  # fmt: skip


@pytest.mark.parametrize("name", TENSOR_FAULTS)
def test_weights_that_are_not_this_head_are_refused(tmp_path: Path, name: str) -> None:
    change, expected = TENSOR_FAULTS[name]
    theirs = publish.amazon(small_head(), tmp_path / "theirs")
    edit_tensors(theirs, change)
    assert any(expected in fault for fault in faults_of(theirs)), faults_of(theirs)


@pytest.mark.parametrize(
    "values,words", [("ids", "target ids where offsets belong"), ("moved", "1 of them not zero")]
)
def test_a_map_beside_a_full_vocabulary_must_be_the_identity(tmp_path: Path, values: str, words: str) -> None:
    theirs = publish.amazon(small_head(draft_vocab_size=96), tmp_path / "theirs")
    changed = torch.arange(96) if values == "ids" else torch.zeros(96, dtype=torch.int64)
    if values == "moved":
        changed[4] = 1
    edit_tensors(theirs, lambda t: t.update(d2t=changed))
    assert any(words in fault for fault in faults_of(theirs))


def test_without_lm_head_a_full_vocabulary_would_take_the_targets(tmp_path: Path) -> None:
    theirs = publish.amazon(small_head(draft_vocab_size=96), tmp_path / "theirs")
    edit_tensors(theirs, drop("lm_head.weight"))
    (fault,) = faults_of(theirs)
    assert "vLLM would take the target's in its place" in fault


def test_pickles_are_not_opened(tmp_path: Path) -> None:
    theirs = publish.amazon(small_head(), tmp_path / "theirs")
    (theirs / WEIGHTS).rename(theirs / "pytorch_model.bin")
    (fault,) = faults_of(theirs)
    assert fault.startswith("weights: pytorch_model.bin; expected a safetensors file; pickled files run code")
    assert "torch.load('pytorch_model.bin', weights_only=True)" in fault


def test_a_damaged_file_and_none_at_all(tmp_path: Path) -> None:
    theirs = publish.amazon(small_head(), tmp_path / "theirs")
    (theirs / WEIGHTS).write_bytes((theirs / WEIGHTS).read_bytes()[:500])
    assert any("model.safetensors: not readable" in fault for fault in faults_of(theirs))
    (theirs / CONFIG).write_text("[]")
    assert faults_of(theirs)[0].startswith("config.json: holds a list")
    (theirs / CONFIG).unlink()
    assert faults_of(theirs)[0].startswith("config.json: missing")


def test_all_faults_at_once_in_config_and_weights(tmp_path: Path) -> None:
    theirs = publish.amazon(small_head(), tmp_path / "theirs")
    edit(theirs, put(vocab_size=97, hidden_act="gelu", ptd_token_id=3, pard_token=4))
    edit_tensors(theirs, drop("norm.weight"))
    text = " ".join(faults_of(theirs))
    for part in ("vocab_size: 97", "hidden_act", "ptd_token_id: 3; expected 4", "norm.weight: missing"):
        assert part in text


def test_a_speculators_head_of_another_kind_is_refused(tmp_path: Path) -> None:
    theirs = publish.speculators(small_head(), tmp_path / "theirs")
    edit(theirs, put(speculators_model_type="dflash"))
    assert any("speculators_model_type: 'dflash'" in fault for fault in faults_of(theirs))
    edit(theirs, put(speculators_model_type="eagle3"))
    assert any("the head has a mask_hidden" in fault for fault in faults_of(theirs))


@pytest.mark.parametrize("value", [None, [], {}, "x", -1, True, 10**30])
def test_any_value_under_any_key_is_no_traceback(tmp_path: Path, value: Any) -> None:
    for publisher in (publish.amazon, publish.speculators):
        theirs = publisher(small_head(), tmp_path / publisher.__name__)
        config = json.loads((theirs / CONFIG).read_text())
        inner = config.get("transformer_layer_config", {})
        extra = (
            "rope_scaling",
            "rope_parameters",
            "layer_types",
            "sliding_window",
            "eagle_config",
            "dflash_config",
        )
        for section, key in [(config, key) for key in (*config, *extra)] + [(inner, key) for key in inner]:
            before = dict(section)
            section[key] = value
            (theirs / CONFIG).write_text(json.dumps(config))
            with contextlib.suppress(HeadFault):
                read_foreign(theirs, FACTS)
            section.clear()
            section.update(before)
