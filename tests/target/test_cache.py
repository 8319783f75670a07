"""The cache that grows in place gives what the uncached pass and transformers' own cache give."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import DynamicCache

from peagle_train.target import cache as cache_module
from peagle_train.target.adapter import Target
from peagle_train.twin.models import TWINS, tiny_gemma4, tiny_llama
from tests.target.test_adapter import load, tokens

LENGTH = 24
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


@pytest.fixture(autouse=True)
def small_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    """So small that every test makes the buffers grow."""
    monkeypatch.setattr(cache_module, "_FIRST_CAPACITY", 4)


@pytest.fixture(scope="module", params=sorted(TWINS))
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    return load(TWINS[request.param], tmp_path_factory.mktemp(request.param))


def test_cached_equals_uncached_and_transformers_own(target: Target) -> None:
    ids = tokens(2, LENGTH)
    whole = target.forward(ids, aux_layers=[0, 2]).last
    cache, own = target.new_cache(), DynamicCache(config=target.model.config)
    start = 0
    for size in (10, 1, 1, 5, 1, 6):
        part = ids[:, start : start + size]
        states = target.forward(part, aux_layers=[0, 2], cache=cache)
        torch.testing.assert_close(states.last, whole[:, start : start + size], **CLOSE)
        reference = target.model(part, use_cache=True, **{target._cache_argument: own})
        torch.testing.assert_close(target.logits(states.last), reference.logits.float(), **CLOSE)
        start += size
        assert cache.length == start == own.get_seq_length()


def test_crop_then_continue_equals_fresh(target: Target) -> None:
    ids, wrong = tokens(1, LENGTH), tokens(1, 6, seed=9)
    cache = target.new_cache()
    target.forward(ids[:, :14], aux_layers=[], cache=cache)
    target.forward(wrong, aux_layers=[], cache=cache)
    cache.crop(14)
    continued = target.forward(ids[:, 14:], aux_layers=[], cache=cache).last
    whole = target.forward(ids, aux_layers=[]).last
    torch.testing.assert_close(continued, whole[:, 14:], **CLOSE)
    cache.crop(0)
    torch.testing.assert_close(target.forward(ids, aux_layers=[], cache=cache).last, whole, **CLOSE)


def test_rows_that_share_a_prefix_equal_each_alone(target: Target) -> None:
    prefix, own = tokens(1, 11), tokens(3, LENGTH - 11, seed=4)
    cache = target.new_cache()
    shared = target.forward(prefix, aux_layers=[2], cache=cache)
    cache.select(torch.zeros(3, dtype=torch.long))
    continued = target.forward(own, aux_layers=[2], cache=cache)
    for row in range(3):
        alone = target.forward(torch.cat([prefix, own[row : row + 1]], dim=1), aux_layers=[2])
        torch.testing.assert_close(shared.aux[0], alone.aux[0, :11], **CLOSE)
        torch.testing.assert_close(continued.aux[row], alone.aux[0, 11:], **CLOSE)
        torch.testing.assert_close(continued.last[row], alone.last[0, 11:], **CLOSE)


def test_select_drops_rows_and_padding(target: Target) -> None:
    lengths = [LENGTH, 12, 15]
    rows = [tokens(length, seed=length) for length in lengths]
    ids, mask = torch.zeros(3, LENGTH, dtype=torch.long), torch.zeros(3, LENGTH + 3, dtype=torch.long)
    mask[:, LENGTH:] = 1
    for number, row in enumerate(rows):
        ids[number, LENGTH - len(row) :], mask[number, LENGTH - len(row) : LENGTH] = row, 1
    cache = target.new_cache()
    target.forward(ids, aux_layers=[], cache=cache, attention_mask=mask[:, :LENGTH])

    kept, start = torch.tensor([2, 1]), LENGTH - 15
    cache.select(kept, start)
    assert cache.length == 15
    more = tokens(2, 3, seed=5)
    continued = target.forward(more, aux_layers=[], cache=cache, attention_mask=mask[kept, start:]).last
    for number, row in enumerate(kept.tolist()):
        whole = torch.cat([rows[row], more[number]])[None]
        alone = target.forward(whole, aux_layers=[]).last
        torch.testing.assert_close(continued[number], alone[0, -3:], **CLOSE)


def test_layers_that_share_keys(tmp_path: Path) -> None:
    """Gemma-4's small models reuse keys in their last layers, whose own cache stays empty."""
    small = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 448}
    target = Target.load(tiny_gemma4(tmp_path, **small), dtype="float32", device="cpu")
    ids, cache = tokens(1, LENGTH), target.new_cache()
    whole = target.forward(ids, aux_layers=[]).last
    target.forward(ids[:, :12], aux_layers=[], cache=cache)
    cache.crop(9)
    continued = target.forward(ids[:, 9:], aux_layers=[], cache=cache).last
    torch.testing.assert_close(continued, whole[:, 9:], **CLOSE)


def test_buffers_are_written_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cache_module, "_FIRST_CAPACITY", 64)
    target, cache = load(tiny_llama, tmp_path), cache_module.KeyValueCache()
    target.forward(tokens(1, 10), aux_layers=[], cache=cache)
    place = cache.layers[0].keys.data_ptr()
    for _ in range(5):
        target.forward(tokens(1, 1), aux_layers=[], cache=cache)
    assert cache.layers[0].keys.data_ptr() == place and cache.layers[0].keys.shape[2] == 15


def test_wrong_lengths_are_refused(tmp_path: Path) -> None:
    target = load(tiny_llama, tmp_path)
    cache = target.new_cache()
    target.forward(tokens(1, 5), aux_layers=[], cache=cache)
    for length in (-1, 6):
        with pytest.raises(ValueError, match="holds 5 positions"):
            cache.crop(length)
        with pytest.raises(ValueError, match="holds 5 positions"):
            cache.select(torch.tensor([0]), length)
