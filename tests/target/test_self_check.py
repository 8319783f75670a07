"""What the families table does not know is refused when a target is loaded, whatever it is."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

from peagle_train.errors import PeagleError
from peagle_train.recipe.schema import TargetSection
from peagle_train.target import cache as cache_module
from peagle_train.target.adapter import Target
from peagle_train.target.self_check import self_check
from peagle_train.target.source import describe, obtain
from peagle_train.twin.models import TWINS, tiny_gemma4, tiny_gpt_oss, tiny_llama, tiny_qwen3_moe
from peagle_train.twin.tokenizers import save_tokenizer
from tests.target.test_adapter import load


@pytest.mark.parametrize("kind", sorted(TWINS))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_every_twin_passes_in_both_types(kind: str, dtype: str, tmp_path: Path) -> None:
    Target.load(TWINS[kind](tmp_path), dtype=dtype, device="cpu")


def drop_softcap(target: Target, patch: pytest.MonkeyPatch) -> None:
    target.facts = dataclasses.replace(target.facts, logit_softcap=None)


def invent_softcap(target: Target, patch: pytest.MonkeyPatch) -> None:
    target.facts = dataclasses.replace(target.facts, logit_softcap=3.0)


def scale_logits(target: Target, patch: pytest.MonkeyPatch) -> None:
    """As Granite does, outside decoder and head."""
    forward = target.model.forward

    def scaled(*args: Any, **settings: Any) -> Any:
        output = forward(*args, **settings)
        output.logits = output.logits / 8
        return output

    patch.setattr(target.model, "forward", scaled)


def skip_the_norm(target: Target, patch: pytest.MonkeyPatch) -> None:
    target._norm = torch.nn.Identity()


def tap_one_layer_late(target: Target, patch: pytest.MonkeyPatch) -> None:
    first, *rest = target._decoder.layers
    patch.setattr(target, "decoder_layers", lambda: [*rest, first])


def forget_the_past(target: Target, patch: pytest.MonkeyPatch) -> None:
    """A cache that hands attention the newest entries alone."""
    update = cache_module._GrowingLayer.update

    def newest(self: Any, keys: torch.Tensor, values: torch.Tensor, *args: Any, **more: Any) -> Any:
        update(self, keys, values, *args, **more)
        past = self.keys[:, :, : -keys.shape[2]]
        self.key_buffer[:, :, : past.shape[2]] = 0
        return self.keys, self.values

    patch.setattr(cache_module._GrowingLayer, "update", newest)


def look_ahead(target: Target, patch: pytest.MonkeyPatch) -> None:
    """Attention in both directions."""
    for layer in target._decoder.layers:
        layer.self_attn.is_causal = False


def see_the_padding(target: Target, patch: pytest.MonkeyPatch) -> None:
    forward = target._decoder.forward

    def unmasked(*, attention_mask: torch.Tensor | None, **settings: Any) -> Any:
        mask = None if attention_mask is None else torch.ones_like(attention_mask)
        return forward(attention_mask=mask, **settings)

    patch.setattr(target._decoder, "forward", unmasked)


Lie = Callable[[Target, pytest.MonkeyPatch], None]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("lie", "twin", "found"),
    [
        (drop_softcap, tiny_gemma4, "its logits differ"),
        (invent_softcap, tiny_llama, "its logits differ"),
        (scale_logits, tiny_gpt_oss, "its logits differ"),
        (skip_the_norm, tiny_qwen3_moe, "the final norm of the last layer differs"),
        (tap_one_layer_late, tiny_llama, "the tap of aux layer 0 differs from hidden_states"),
        (forget_the_past, tiny_llama, "read in two parts with a KV cache"),
        (look_ahead, tiny_llama, "read in two parts with a KV cache"),
        (see_the_padding, tiny_llama, "padded on the left"),
    ],
)
def test_each_planted_lie_is_found(
    lie: Lie,
    twin: Callable[..., Path],
    found: str,
    dtype: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target = Target.load(twin(tmp_path), dtype=dtype, device="cpu")
    lie(target, monkeypatch)
    with pytest.raises(PeagleError, match=rf"{found}.*Needed in peagle_train/target/families\.py"):
        self_check(target)


def test_loading_runs_the_check(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A class that scales its logits, as a later transformers or remote code might."""
    forward = LlamaForCausalLM.forward

    def scaled(self: Any, *args: Any, **settings: Any) -> Any:
        output = forward(self, *args, **settings)
        output.logits = output.logits * 0.5
        return output

    monkeypatch.setattr(LlamaForCausalLM, "forward", scaled)
    with pytest.raises(PeagleError, match="its logits differ"):
        load(tiny_llama, tmp_path)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("logits_scaling", 8.0),
        ("logit_scale", 0.0625),
        ("final_logit_softcapping", 30.0),
        ("attn_logit_softcapping", 50.0),
        ("residual_multiplier", 0.22),
        ("embedding_multiplier", 12),
        ("query_pre_attn_scalar", 256),
        ("scale_emb", 12),
        ("use_alibi", True),
        ("sliding_window", 64),
        ("attn_temperature_tuning", True),
    ],
)
def test_a_setting_that_the_class_would_pass_over(tmp_path: Path, key: str, value: Any) -> None:
    edit_config(tiny_llama(tmp_path), **{key: value})
    message = rf"sets `{key}` to {value!r}, which this class of transformers does not compute"
    for ask in (lambda: describe(TargetSection(model=str(tmp_path))), lambda: reload(tmp_path)):
        with pytest.raises(PeagleError, match=message):
            ask()


def test_settings_that_change_nothing_pass(tmp_path: Path) -> None:
    edit_config(
        tiny_qwen3_moe(tmp_path),
        max_window_layers=28,
        use_qk_norm=True,
        qkv_bias=False,
        logits_scaling=1.0,
        attn_logit_softcapping=None,
        is_llama_config=True,
        rope_scaling=None,
        shared_expert_intermediate_size=0,
    )
    reload(tmp_path)
    assert obtain(TargetSection(model=str(tmp_path)), Console(quiet=True)) == tmp_path


def test_tensors_that_the_class_does_not_use(tmp_path: Path) -> None:
    path = tiny_llama(tmp_path) / "model.safetensors"
    weights = load_file(path)
    weights["model.layers.0.self_attn.q_norm.weight"] = torch.ones(16)
    save_file(weights, path, metadata={"format": "pt"})
    with pytest.raises(PeagleError, match=r"has no use for 1 tensors .*layers\.0\.self_attn\.q_norm"):
        reload(tmp_path)


def test_a_tokenizer_of_another_model(tmp_path: Path) -> None:
    tiny_llama(tmp_path, vocab=112)
    save_tokenizer(tmp_path, "gemma4", 448)
    with pytest.raises(PeagleError, match=r"its tokenizer writes id \d+, but its table has only 112 rows"):
        reload(tmp_path)


def test_a_class_nobody_checked(tmp_path: Path) -> None:
    edit_config(tiny_llama(tmp_path), architectures=["GraniteForCausalLM"])
    with pytest.raises(
        PeagleError, match=r"GraniteForCausalLM: not supported.*tiny twin to peagle_train/twin/"
    ):
        reload(tmp_path)


def reload(folder: Path) -> Target:
    return Target.load(folder, dtype="float32", device="cpu")


def edit_config(folder: Path, **changes: object) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))
