"""The rule by which vLLM groups KV caches, on the facts known of it; tests/vllm asks vLLM itself."""

from __future__ import annotations

import pytest

from peagle_train.export.serving import kv_layers, serving_flags
from peagle_train.recipe.schema import TargetSection
from peagle_train.target.facts import KVLayer
from peagle_train.target.kv_groups import groups_of_head, needs_flag
from peagle_train.target.source import describe
from peagle_train.twin import models as twins
from tests.export.conftest import FACTS, small_head

FULL, SLIDING = KVLayer(None, 8, 64), KVLayer(128, 8, 64)
WIDE = KVLayer(None, 4, 512)


def repeated(pattern: list[KVLayer], times: int) -> list[KVLayer]:
    return pattern * times


@pytest.mark.parametrize(
    ("target", "head", "groups"),
    [
        (repeated([FULL], 48), [FULL] * 4, 1),
        (repeated([SLIDING, FULL], 12), [FULL] * 4, 1),  # gpt-oss-20b: 12 and 16 make one group of 16
        (repeated([SLIDING, FULL], 12), [FULL] * 6, 2),  # 12 and 18: cut by 12
        (repeated([SLIDING, FULL], 18), [FULL] * 4, 1),  # gpt-oss-120b
        (repeated([SLIDING, FULL], 4), [FULL], 1),  # an 8-layer twin
        (repeated([SLIDING, FULL], 4), [FULL] * 2, 2),
        (repeated([SLIDING] * 5 + [WIDE], 10), [WIDE] * 4, 1),  # gemma-4-31b, the head like its full layers
        (repeated([SLIDING] * 5 + [WIDE], 10), [FULL] * 4, 1),  # of another width: four of its own
        (repeated([SLIDING, FULL], 12), [KVLayer(None, 2, 64)] * 4, 1),
        (repeated([FULL], 8), [SLIDING] * 2, 1),
        (repeated([FULL], 8), [FULL, SLIDING], 2),  # two kinds in the head are two groups whatever the target
        (repeated([SLIDING], 8), [SLIDING] * 4, 1),
    ],
)
def test_groups_of_a_head(target: list[KVLayer], head: list[KVLayer], groups: int) -> None:
    assert groups_of_head(target, head) == groups


def test_two_windows_cannot_share_a_group() -> None:
    oss = repeated([SLIDING, FULL], 4)
    assert needs_flag([FULL] * 2, oss)
    assert needs_flag([SLIDING, FULL], oss)  # one window: the flag merges all
    with pytest.raises(ValueError, match="windows of 64 and 128 in head and target"):
        needs_flag([KVLayer(64, 8, 64), FULL], oss)


def test_a_target_of_windows_alone_gives_its_window_to_full_layers() -> None:
    with pytest.raises(ValueError, match="full layers beside a target whose every layer has a window of 128"):
        needs_flag([FULL] * 2, [SLIDING] * 8)
    assert not needs_flag([SLIDING] * 2, [SLIDING] * 8)


def test_layers_are_read_from_head_and_target(tmp_path) -> None:
    head = small_head(layers=2, layer_types=("full_attention", "sliding_attention"), sliding_window=16).config
    assert kv_layers(head) == (KVLayer(None, 2, 8), KVLayer(16, 2, 8))
    assert serving_flags(head, FACTS.kv_layers) == ("--disable-hybrid-kv-cache-manager",)
    twin = describe(TargetSection(model=str(twins.tiny_gemma4(tmp_path / "gemma"))))
    full = KVLayer(None, 2, 32)
    assert twin.kv_layers == (KVLayer(8, 2, 16), KVLayer(8, 2, 16), full) * 2
    deep = describe(TargetSection(model=str(twins.tiny_gemma4(tmp_path / "deep", layers=12))))
    assert deep.kv_layers == twin.kv_layers * 2  # from ten layers on transformers numbers them 00, 01, ...
    oss = describe(TargetSection(model=str(twins.tiny_gpt_oss(tmp_path / "oss"))))
    assert [layer.window for layer in oss.kv_layers] == [8, None, 8, None]
    plain = describe(TargetSection(model=str(twins.tiny_qwen2(tmp_path / "qwen2"))))
    assert plain.kv_layers == (KVLayer(None, 2, 16),) * 4
