"""What is no head, not this target's, or not told in full is refused, all of it at once, with the cure."""

from __future__ import annotations

import contextlib
import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

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
    "two mask tokens": (put(pard_token=5), "ptd_token_id: 3; expected 5 as in pard_token: two values"),
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


AUX, INNER = "eagle_aux_hidden_state_layer_ids", "transformer_layer_config"
# publisher, the place that is changed, its other value, the fault's beginning.
CONTRADICTIONS: list[tuple[str, str, Any, str]] = [
    ("amazon", AUX, [1, 2, 3], f"eagle_config.{AUX}: [1, 2, 4]; expected [1, 2, 3] as in {AUX}"),
    ("amazon", "dflash_config.target_layer_ids", [0, 1, 2], "dflash_config.target_layer_ids: [1, 2, 3]"),
    ("amazon", "num_aux_hidden_states", 2, "num_aux_hidden_states: 2; expected 3"),
    ("amazon", "num_aux_layers", 4, "num_aux_layers: 4; expected 3"),
    ("amazon", "eagle_config.norm_before_fc", True, "norm_before_fc: False; expected True as in eagle"),
    ("amazon", "eagle_config.norm_output", True, "eagle_config.norm_output: True; expected False"),
    ("amazon", "eagle_config.draft_vocab_size", 41, "eagle_config.draft_vocab_size: 41; expected 40 as in"),
    ("amazon", "eagle_config.target_hidden_size", 64, "eagle_config.target_hidden_size: 64; expected 32"),
    ("amazon", "dtype", "float16", "dtype: 'float16'; expected 'bfloat16' as in torch_dtype"),
    ("amazon", "mask_token_id", 5, "ptd_token_id: 3; expected 5 as in mask_token_id"),
    ("amazon", "dflash_config.mask_token_id", 5, "ptd_token_id: 3; expected 5 as in dflash_config.mask"),
    ("amazon", "rope_scaling.rope_theta", 9.0, "rope_theta: 30000.0; expected 9.0 as in rope_scaling."),
    ("amazon", "rope_scaling", {"type": "yarn", "rope_type": "default"}, "rope_scaling.type"),
    ("speculators", AUX, [1, 2, 3], f"{INNER}.{AUX}: [1, 2, 4]; expected [1, 2, 3] as in {AUX}"),
    ("speculators", f"eagle_config.{AUX}", [1, 2, 3], f"eagle_config.{AUX}: [1, 2, 3]; expected [1, 2, 4]"),
    ("speculators", f"{INNER}.eagle_config.{AUX}", [1, 2], f"{INNER}.eagle_config.{AUX}: [1, 2]; expected"),
    ("speculators", "num_aux_hidden_states", 2, "num_aux_hidden_states: 2; expected 3"),
    ("speculators", f"{INNER}.num_aux_layers", 2, f"{INNER}.num_aux_layers: 2; expected 3"),
    ("speculators", f"{INNER}.draft_vocab_size", 41, f"{INNER}.draft_vocab_size: 41; expected 40 as in"),
    ("speculators", f"{INNER}.target_hidden_size", 64, f"{INNER}.target_hidden_size: 64; expected 32"),
    ("speculators", f"{INNER}.norm_before_residual", True, f"{INNER}.norm_before_residual: True; expected F"),
    ("speculators", f"{INNER}.eagle_config.norm_before_fc", True, "norm_before_fc: False; expected True"),
    ("speculators", f"{INNER}.dtype", "float16", f"{INNER}.dtype: 'float16'; expected 'bfloat16'"),
    ("speculators", f"{INNER}.mask_token_id", 5, "mask_token_id: 3; expected 5 as in transformer_layer"),
    ("speculators", "pard_token", 5, "pard_token: 5; expected 3 as in mask_token_id"),
    ("speculators", "rope_theta", 9.0, "rope_theta: 9.0; expected 30000.0 as in transformer_layer_config."),
    ("speculators", f"{INNER}.rope_theta", 9.0, f"{INNER}.rope_theta: 9.0; expected 30000.0 as in"),
    ("speculators", "rope_scaling.rope_type", "yarn", "rope_scaling.rope_type: 'yarn'; expected 'default'"),
    ("speculators", "layer_types", ["sliding_attention"] * 2, "layer_types: ['sliding_attention', 'sliding"),
    ("speculators", "hidden_size", 64, "hidden_size: 64; expected 32 as in transformer_layer_config.hidden"),
    ("speculators", "rms_norm_eps", 0.5, "rms_norm_eps: 0.5; expected"),
    ("speculators", "speculators_config.algorithm", "eagle3", "speculators_config.algorithm: 'eagle3'"),
]  # fmt: skip


def set_at(place: str, value: Any) -> Any:
    def change(config: dict[str, Any]) -> None:
        *sections, key = place.split(".")
        for name in sections:
            config = config.setdefault(name, {})
        config[key] = value

    return change


@pytest.mark.parametrize(
    "publisher,place,value,words", CONTRADICTIONS, ids=[f"{row[0]}-{row[1]}" for row in CONTRADICTIONS]
)
def test_two_values_for_one_fact_are_refused(
    tmp_path: Path, publisher: str, place: str, value: Any, words: str
) -> None:
    theirs = getattr(publish, publisher)(small_head(), tmp_path / "theirs")
    if publisher == "amazon":
        edit(theirs, put(norm_before_fc=False))
    else:  # what may stand in both levels stands in both
        edit(theirs, set_at(f"{INNER}.{AUX}", [1, 2, 4]))
        edit(theirs, set_at("target_hidden_size", 32))
        edit(theirs, set_at("norm_before_fc", False))
    read_foreign(theirs, FACTS)
    edit(theirs, set_at(place, value))
    faults = [
        fault for fault in faults_of(theirs) if ": two values for one fact; ask the head's maker" in fault
    ]
    assert any(fault.startswith(f"config.json: {words}") for fault in faults), faults_of(theirs)


@pytest.mark.parametrize("publisher", ["amazon", "speculators"])
def test_one_value_in_every_place_is_no_fault(tmp_path: Path, publisher: str) -> None:
    theirs = getattr(publish, publisher)(small_head(), tmp_path / "theirs")
    read = read_foreign(theirs, FACTS).head.config
    for section in ("", "eagle_config.", f"{INNER}.", f"{INNER}.eagle_config.")[
        : 4 if "sp" in publisher else 2
    ]:
        for key, value in {
            AUX: [4, 2, 1],
            "num_aux_layers": 3,
            "draft_vocab_size": 40,
            "target_hidden_size": 32,
            "torch_dtype": "torch.bfloat16",
            "norm_before_fc": False,
            "rope_theta": 30000,
            "layer_types": ["full_attention"] * 2,
        }.items():
            edit(theirs, set_at(f"{section}{key}", value))
    assert read_foreign(theirs, FACTS).head.config == read


def test_the_cures_speak_of_a_head_that_someone_else_made(tmp_path: Path) -> None:
    def break_it(t: dict[str, torch.Tensor]) -> None:
        t["norm.weight"].fill_(float("nan"))
        t["fc.weight"].zero_()

    theirs = publish.amazon(small_head(), tmp_path / "theirs")
    edit(theirs, put(intermediate_size=-64, hidden_act="gelu", fc_norm="yes", rope_theta=-1))
    edit_tensors(theirs, break_it)
    told = faults_of(theirs)
    theirs_whole = publish.amazon(small_head(), tmp_path / "whole")
    edit_tensors(theirs_whole, break_it)
    told += faults_of(theirs_whole)
    wanted = ("intermediate_size", "hidden_act", "fc_norm", "rope_theta", "norm.weight", "fc.weight")
    for key in wanted:
        (line,) = (fault for fault in told if f": {key}: " in fault)
        assert line.endswith("; fetch the head again, or ask its maker"), line
        for ours in ("would guess", "would assume", "export", "was trained"):
            assert ours not in line, line


def test_a_quantised_section_is_named_with_its_file_and_place(tmp_path: Path) -> None:
    theirs = publish.speculators(small_head(), tmp_path / "theirs")
    edit(theirs, set_at(f"{INNER}.quantization_config", {"bits": 4}))
    (fault,) = faults_of(theirs)
    assert fault.startswith(f"config.json: {INNER}.quantization_config: present; expected none")


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
    theirs = publish.amazon(small_head(), tmp_path / "the maker's head")
    tensors = load_file(theirs / WEIGHTS)
    (theirs / WEIGHTS).unlink()
    names = sorted(tensors)
    for file, held in (("pytorch_model-1.bin", names[:9]), ("pytorch_model-2.bin", names[9:])):
        torch.save({name: tensors[name] for name in held}, theirs / file)
    torch.save({"lr": 1.0}, theirs / "training_args.bin")
    (fault,) = faults_of(theirs)
    assert fault.startswith(
        "weights: pytorch_model-1.bin, pytorch_model-2.bin; expected a safetensors file; pickled files run"
    )
    # The line works from any folder, whatever the names are, and gives the head that was pickled.
    command = fault[fault.index("python -c ") :].replace("python", shlex.quote(sys.executable), 1)
    (tmp_path / "elsewhere").mkdir()
    subprocess.run(["bash", "-c", command], cwd=tmp_path / "elsewhere", check=True, capture_output=True)
    assert read_foreign(theirs, FACTS).head.config == small_head().config
    assert load_file(theirs / WEIGHTS).keys() == tensors.keys()


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
