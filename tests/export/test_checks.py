"""Every way we know to break a head is refused, by one clear fault that names file, key and cure."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from peagle_train.export.checks import HeadFault, check_head
from tests.export.conftest import FACTS, small_head

CONFIG, WEIGHTS, RECORD = "config.json", "model.safetensors", "export.json"
IDS = small_head().draft_token_ids


def faults_of(directory: Path, target=FACTS) -> list[str]:
    with pytest.raises(HeadFault) as caught:
        check_head(directory, target)
    assert caught.value.source == str(directory)
    for fault in caught.value.faults:
        assert "; expected " in fault, fault
        assert fault in str(caught.value)
    return caught.value.faults


def edit(directory: Path, change: Callable[[dict[str, Any]], Any], file: str = CONFIG) -> None:
    value = json.loads((directory / file).read_text())
    change(value)
    (directory / file).write_text(json.dumps(value))


def edit_tensors(directory: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    tensors = load_file(directory / WEIGHTS)
    change(tensors)
    save_file(tensors, directory / WEIGHTS)


def put(**values: Any) -> Callable[[dict[str, Any]], None]:
    return lambda held: held.update(values)


def drop(*keys: str) -> Callable[[dict[str, Any]], None]:
    return lambda held: [held.pop(key) for key in keys]


def poison(name: str, value: float) -> Callable[[dict[str, torch.Tensor]], None]:
    return lambda held: held[name].view(-1)[:2].fill_(value)


def test_a_sound_head_passes(exported) -> None:
    directory = exported()
    report = check_head(directory, FACTS)
    assert report.config == small_head().config
    assert report.dtype == "float32"
    assert report.parameters == sum(parameter.numel() for parameter in small_head().parameters())
    assert dict(report.rows())["draft vocabulary"] == "40 of 96 tokens"


TENSOR_FAULTS = {
    "a missing norm": (drop("norm.weight"), "norm.weight: missing; expected shape [32]"),
    "a missing projection": (
        drop("layers.1.self_attn.q_proj.weight"),
        "layers.1.self_attn.q_proj.weight: missing; expected shape [32, 32]",
    ),
    "no mask_hidden": (drop("mask_hidden"), "mask_hidden: missing; expected shape [1, 1, 96]"),
    "no lm_head": (drop("lm_head.weight"), "lm_head.weight: missing; expected shape [40, 32]"),
    "no d2t": (drop("d2t"), "d2t: missing; expected shape [40]"),
    "an unknown tensor": (put(extra=torch.ones(2)), "extra: unknown tensor"),
    "a layer too many": (put(**{"layers.2.x": torch.ones(2)}), "layers.2.x: unknown tensor"),
    "a wrong shape": (
        put(**{"fc.weight": torch.ones(32, 64)}),
        "fc.weight: shape [32, 64]; expected [32, 96] by config.json",
    ),
    "a narrow mask_hidden": (put(mask_hidden=torch.ones(64)), "mask_hidden: shape [64]; expected [1, 1, 96]"),
    "a wrong dtype": (
        put(**{"norm.weight": torch.ones(32, dtype=torch.float64)}),
        "norm.weight: dtype F64; expected F32 by dtype in config.json",
    ),
    "an integer weight": (
        put(**{"norm.weight": torch.ones(32, dtype=torch.int8)}),
        "norm.weight: dtype I8; expected F32 by dtype in config.json",
    ),
    "NaN": (poison("fc.weight", float("nan")), "fc.weight: 2 of 3,072 values are NaN or infinite"),
    "infinity": (poison("norm.weight", float("-inf")), "norm.weight: 2 of 32 values are NaN or infinite"),
    "d2t in int32": (lambda t: t.update(d2t=t["d2t"].int()), "d2t: dtype I32; expected I64 offsets"),
    "a short d2t": (lambda t: t.update(d2t=t["d2t"][:39].clone()), "d2t: shape [39]; expected [40]"),
    "d2t out of range": (poison("d2t", 96), "d2t: 2 of 40 entries lead outside 0..95"),
    "a negative d2t": (
        lambda t: t["d2t"][:1].fill_(-1),
        "d2t: 1 of 40 entries lead outside 0..95",
    ),
    "a repeated token": (
        lambda t: t["d2t"][1:2].fill_(int(IDS[0]) - 1),
        "d2t: 1 target tokens appear more than once",
    ),
    "the mask token drafted": (
        lambda t: t["d2t"][5:6].fill_(3 - 5),
        "d2t: the mask token 3 is in the draft vocabulary",
    ),
    "ids instead of offsets": (
        lambda t: t.update(d2t=IDS.clone()),
        "these look like target ids: subtract the draft ids",
    ),
}


@pytest.mark.parametrize("name", TENSOR_FAULTS)
def test_a_broken_tensor_is_one_fault(exported, name: str) -> None:
    change, expected = TENSOR_FAULTS[name]
    directory = exported()
    (directory / RECORD).unlink()
    edit_tensors(directory, change)
    faults = faults_of(directory)
    assert len(faults) == 1, faults
    assert faults[0].startswith(f"{WEIGHTS}: ")
    assert expected in faults[0]


AUX = "eagle_aux_hidden_state_layer_ids"


def aux(*layers: int) -> Callable[[dict[str, Any]], None]:
    return put(
        **{AUX: list(layers), "eagle_config": {AUX: list(layers)}, "num_aux_hidden_states": len(layers)}
    )


CONFIG_FAULTS = {
    "a mask id beyond the vocabulary": (
        put(pard_token=96, ptd_token_id=96),
        "pard_token: 96; expected an id below",
    ),
    "a negative mask id": (put(pard_token=-1, ptd_token_id=-1), "pard_token: -1; expected an id below"),
    "two mask ids": (
        put(ptd_token_id=4),
        "pard_token and ptd_token_id: [3, 4]; expected the mask token's id",
    ),
    "another mask key": (put(mask_token_id=5), "mask_token_id: 5; expected none, or 3"),
    "a nested mask key": (
        put(dflash_config={"mask_token_id": 5}),
        "dflash_config.mask_token_id: 5; expected none",
    ),
    "no mask id": (drop("ptd_token_id"), "pard_token and ptd_token_id: [3, None]"),
    "a wrong aux count": (put(num_aux_hidden_states=4), "num_aux_hidden_states: 4; expected 3"),
    "no aux count": (drop("num_aux_hidden_states"), "num_aux_hidden_states: missing; expected 3"),
    "aux layers beyond the target": (aux(1, 2, 5), f"{AUX}: [5] out of range; expected 0..4"),
    "unsorted aux layers": (aux(2, 1, 4), f"{AUX}: [2, 1, 4]; expected [1, 2, 4]: rising"),
    "no aux layers": (drop(AUX), f"{AUX}: missing; expected a list of layer ids"),
    "other aux layers inside": (
        put(eagle_config={AUX: [1, 2, 3]}),
        f"eagle_config.{AUX}: [1, 2, 3]; expected [1, 2, 4]",
    ),
    "aux states switched off": (
        put(eagle_config={AUX: [1, 2, 4], "use_aux_hidden_state": False}),
        "eagle_config.use_aux_hidden_state: False; expected true",
    ),
    "too few positions": (
        put(max_position_embeddings=256),
        "max_position_embeddings: 256; expected at least",
    ),
    "no rope base": (drop("rope_theta"), "rope_theta: missing; expected a positive number"),
    "an invented rope scaling": (put(rope_scaling={"rope_type": "yarn", "factor": 4}), "rope_scaling: {"),
    "two rope bases": (
        put(rope_parameters={"rope_type": "default", "rope_theta": 1e4}),
        "rope_parameters: {'rope_theta': 10000.0, 'rope_type': 'default'}; expected none",
    ),
    "another target's width": (put(target_hidden_size=33), "target_hidden_size: 33; expected 32"),
    "an option we do not compute": (put(logit_scale=2.0), "logit_scale: 2.0; expected 1.0"),
    "an option that is no switch": (put(fc_norm=1), "fc_norm: 1; expected true or false"),
    "a second word on an option": (
        put(eagle_config={AUX: [1, 2, 4], "norm_before_fc": True}),
        "eagle_config.norm_before_fc: True; expected False as at the top level",
    ),
    "a second count of aux layers": (put(num_aux_layers=5), "num_aux_layers: 5; expected none, or 3"),
    "yarn that ends before the context": (
        put(rope_scaling={"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128}),
        "max_position_embeddings: 512; expected at most 256",
    ),
    "windows without layers": (put(sliding_window=8), "sliding_window: 8; expected none"),
    "layers without a window": (
        put(layer_types=["sliding_attention", "full_attention"]),
        "sliding_window: missing; expected a whole number",
    ),
    "too few kinds of layer": (
        put(layer_types=["full_attention"]),
        "layer_types: ['full_attention']; expected 2 times full_attention or sliding_attention",
    ),
    "an option left out": (drop("fc_norm"), "fc_norm: missing; expected true or false"),
    "another class": (put(architectures=["PEagleLlama"]), "architectures: ['PEagleLlama']; expected"),
    "another model type": (put(model_type="gemma4"), "model_type: 'gemma4'; expected 'llama' or 'qwen3'"),
    "an unknown dtype": (put(dtype="float8"), "dtype: 'float8'; expected one of float32"),
    "a text for a number": (put(hidden_size="32"), "hidden_size: '32'; expected a whole number"),
    "true for a number": (put(num_hidden_layers=True), "num_hidden_layers: True; expected a whole number"),
    "NaN for a number": (put(rms_norm_eps=float("nan")), "rms_norm_eps: nan; expected a positive number"),
    "layers without end": (put(num_hidden_layers=10**12), "num_hidden_layers: 1000000000000; expected"),
    "an uneven head": (put(num_key_value_heads=3), "num_key_value_heads: 3; expected a divisor"),
}


@pytest.mark.parametrize("name", CONFIG_FAULTS)
def test_a_broken_config_is_named(exported, name: str) -> None:
    """Its own fault comes first; a size that is wrong may make tensors misfit as well."""
    change, expected = CONFIG_FAULTS[name]
    directory = exported()
    (directory / RECORD).unlink()
    edit(directory, change)
    faults = faults_of(directory)
    assert faults[0].startswith(f"{CONFIG}: ")
    assert expected in faults[0]
    sizes = ("width", "uneven")
    assert len(faults) == 1 or any(word in name for word in sizes), faults


def test_d2t_beside_a_full_vocabulary(exported) -> None:
    directory = exported(draft_vocab_size=96)
    (directory / RECORD).unlink()
    edit_tensors(directory, put(d2t=torch.zeros(96, dtype=torch.int64)))
    faults = faults_of(directory)
    assert len(faults) == 1
    assert "d2t: present; expected none beside a full vocabulary" in faults[0]


def test_embeddings_against_the_record(exported, tmp_path: Path) -> None:
    """Trained embeddings left out would be replaced by the target's, without a word."""
    directory = exported(own=True)
    edit(directory, drop("sha256"), RECORD)
    edit_tensors(directory, drop("embed_tokens.weight"))
    faults = faults_of(directory)
    assert faults[0].startswith("model.safetensors: embed_tokens.weight: missing; expected [96, 32], trained")
    assert len(faults) == 1


def test_embeddings_a_shared_head_should_not_have(exported) -> None:
    directory = exported(own=False)
    edit(directory, drop("sha256"), RECORD)
    edit_tensors(directory, put(**{"embed_tokens.weight": torch.ones(96, 32)}))
    assert "embed_tokens.weight: present; expected none" in faults_of(directory)[0]


def test_a_head_of_another_width_cannot_share(tmp_path: Path) -> None:
    from peagle_train.export.layout import export_head

    with pytest.raises(HeadFault, match="the target's is 32 wide and the head 16"):
        export_head(small_head(own=False, hidden_size=16), tmp_path / "head", target=FACTS)


@pytest.mark.parametrize(
    ("fact", "value", "expected"),
    [
        (
            "vocab_size",
            97,
            "vocab_size: 96; expected 97, the target's vocab_size; is this the head's own target?",
        ),
        ("hidden_size", 64, "target_hidden_size: 32; expected 64, the target's hidden_size"),
        ("num_layers", 3, f"{AUX}: [4] out of range; expected 0..3"),
        (
            "max_position_embeddings",
            1024,
            "max_position_embeddings: 512; expected at least the target's 1024",
        ),
    ],
)
def test_a_head_of_another_target(exported, fact: str, value: int, expected: str) -> None:
    faults = faults_of(exported(), replace(FACTS, **{fact: value}))
    assert expected in faults[0]


def test_the_recorded_target_is_held_against_too(exported) -> None:
    directory = exported()
    edit(directory, lambda record: record["target"].update(max_position_embeddings=4096), RECORD)
    assert "expected at least the target's 4096" in faults_of(directory, None)[0]


def test_a_config_edited_after_training_is_seen(exported) -> None:
    """rope_theta is a sound number, but not the one the head was trained with."""
    directory = exported()
    edit(directory, put(rope_theta=10000.0))
    faults = faults_of(directory)
    assert "rope_theta: 10000.0; expected 30000.0, with which the head was trained (export.json)" in faults[0]
    assert any("SHA-256" in fault for fault in faults)


def test_a_flipped_weight_that_stays_finite_is_seen(exported) -> None:
    directory = exported()
    edit_tensors(directory, poison("norm.weight", 0.5))
    faults = faults_of(directory)
    assert len(faults) == 1
    assert faults[0].startswith("model.safetensors: SHA-256 ")


def test_a_second_weights_file_is_refused(exported) -> None:
    directory = exported()
    save_file({"norm.weight": torch.ones(32)}, directory / "extra.safetensors")
    assert faults_of(directory)[0].startswith("extra.safetensors: a second weights file")


def test_all_faults_come_at_once(exported) -> None:
    directory = exported()
    (directory / RECORD).unlink()
    edit(directory, put(num_aux_hidden_states=4, rope_scaling={"factor": 2}))
    edit_tensors(
        directory, lambda tensors: (tensors.pop("norm.weight"), poison("fc.weight", float("inf"))(tensors))
    )
    faults = faults_of(directory)
    words = ["num_aux_hidden_states", "rope_scaling", "norm.weight: missing", "fc.weight: 2 of"]
    assert len(faults) == len(words)
    for word, fault in zip(words, faults, strict=True):
        assert word in fault


SPECULATORS_FAULTS = {
    "a model type": (put(model_type="llama"), "model_type: 'llama'; expected none at the top level"),
    "another method": (
        put(speculators_model_type="eagle3"),
        "speculators_model_type: 'eagle3'; expected 'peagle'",
    ),
    "no target": (
        lambda c: c["speculators_config"]["verifier"].pop("name_or_path"),
        "verifier.name_or_path: None",
    ),
    "K of zero": (
        lambda c: c["speculators_config"]["proposal_methods"][0].update(speculative_tokens=0),
        "proposal_methods[0].speculative_tokens: 0; expected the number of tokens to draft",
    ),
    "another mask id outside": (put(mask_token_id=4), "mask_token_id: 4; expected 3 as in"),
    "no mask id outside": (drop("mask_token_id"), "mask_token_id: missing; expected 3 as in"),
    "no draft vocabulary outside": (drop("draft_vocab_size"), "draft_vocab_size: missing; expected 40 as in"),
    "a config that is no object": (
        put(speculators_config=[1]),
        "speculators_config: [1]; expected an object",
    ),
}


@pytest.mark.parametrize("name", SPECULATORS_FAULTS)
def test_a_broken_speculators_config_is_named(exported, name: str) -> None:
    change, expected = SPECULATORS_FAULTS[name]
    directory = exported(format="speculators")
    (directory / RECORD).unlink()
    edit(directory, change)
    faults = faults_of(directory)
    assert len(faults) == 1, faults
    assert expected in faults[0]


def raw_safetensors(header: bytes, data: bytes = b"") -> bytes:
    return struct.pack("<Q", len(header)) + header + data


GARBAGE_WEIGHTS = {
    "empty": b"",
    "noise": bytes(range(256)) * 4,
    "truncated": None,
    "a header beyond the file": struct.pack("<Q", 2**40) + b"{}",
    "a header that is no JSON": raw_safetensors(b"{nonsense"),
    "offsets outside": raw_safetensors(
        b'{"fc.weight":{"dtype":"F32","shape":[2],"data_offsets":[0,800]}}', b"12345678"
    ),
    "an unknown dtype": raw_safetensors(
        b'{"fc.weight":{"dtype":"X9","shape":[1],"data_offsets":[0,4]}}', b"1234"
    ),
    "a shape that overflows": raw_safetensors(
        b'{"fc.weight":{"dtype":"F32","shape":[4294967296,4294967296],"data_offsets":[0,4]}}', b"1234"
    ),
}


@pytest.mark.parametrize("name", GARBAGE_WEIGHTS)
def test_garbage_weights_are_a_fault_and_no_traceback(exported, name: str) -> None:
    directory = exported()
    (directory / RECORD).unlink()
    content = GARBAGE_WEIGHTS[name]
    whole = (directory / WEIGHTS).read_bytes()
    (directory / WEIGHTS).write_bytes(whole[: len(whole) // 2] if content is None else content)
    faults = faults_of(directory)
    assert len(faults) == 1, faults
    assert faults[0].startswith(f"{WEIGHTS}: not readable (")


GARBAGE_JSON = {
    "empty": b"",
    "cut": b'{"hidden_size": 32,',
    "not UTF-8": b"\xff\xfe{}",
    "a list": b"[1, 2]",
    "null": b"null",
    "endless nesting": b"[" * 200_000,
    "a number of 5000 digits": b'{"hidden_size": ' + b"9" * 5000 + b"}",
}


@pytest.mark.parametrize("name", GARBAGE_JSON)
@pytest.mark.parametrize("file", [CONFIG, RECORD])
def test_garbage_json_is_a_fault_and_no_traceback(exported, file: str, name: str) -> None:
    directory = exported()
    (directory / file).write_bytes(GARBAGE_JSON[name])
    assert faults_of(directory)[0].startswith(f"{file}: ")


@pytest.mark.parametrize("value", [None, "x", -1, True, [[]], {"a": []}, 10**30])
def test_any_value_under_any_key_is_no_traceback(exported, value: Any) -> None:
    """Wrong types under every key, of the config and of the record, in both formats."""
    for format in ("plain", "speculators"):
        directory = exported(format=format)
        for file in (CONFIG, RECORD):
            original = (directory / file).read_text()
            for path in paths_of(json.loads(original)):
                edited = json.loads(original)
                held = edited
                for step in path[:-1]:
                    held = held[step]
                held[path[-1]] = value
                (directory / file).write_text(json.dumps(edited))
                if file == CONFIG:  # its checksum is recorded, so any edit is seen
                    assert faults_of(directory, None)
                    continue
                with suppress(HeadFault):
                    check_head(directory)
            (directory / file).write_text(original)


def paths_of(value: Any, above: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    if not isinstance(value, dict):
        return []
    return [path for key, held in value.items() for path in [(*above, key), *paths_of(held, (*above, key))]]


def test_missing_files_and_folders(exported, tmp_path: Path) -> None:
    assert "no such folder; expected one that" in faults_of(tmp_path / "nowhere")[0]
    directory = exported()
    (directory / WEIGHTS).unlink()
    assert faults_of(directory)[0].startswith(f"{WEIGHTS}: missing")
    (directory / CONFIG).unlink()
    assert faults_of(directory)[0].startswith(f"{CONFIG}: missing")
    assert faults_of(directory)[1].startswith(f"{WEIGHTS}: missing")  # all at once here too
    (directory / CONFIG).mkdir()
    assert faults_of(directory)[0].startswith(f"{CONFIG}: cannot be read")


@pytest.mark.parametrize("key", ["intermediate_size", "rope_theta", "fc_norm"])
def test_vllm_guesses_what_is_missing_not_what_is_wrong(exported, key: str) -> None:
    directory = exported()
    for change, guessed in ((put(**{key: -1}), False), (drop(key), True)):
        edit(directory, change)
        (line,) = (fault for fault in faults_of(directory) if fault.startswith(f"{CONFIG}: {key}: "))
        assert ("vLLM would guess" in line or "vLLM would assume" in line) == guessed, line
