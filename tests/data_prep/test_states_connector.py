"""The connector between the scheduler's words and a worker's cache, without a vLLM."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from data_prep.vllm_states import backend

ENGINE = backend.RUNNER.parent
FAKE = Path(__file__).parent / "fake_vllm"
BLOCK, LAYERS, HIDDEN = 4, 3, 2
CACHE = "cache_only_layers.5"


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """states_connector.py above the base classes of the fake vLLM."""
    before = set(sys.modules)
    try:
        monkeypatch.setitem(sys.modules, "vllm", _load("vllm", FAKE / "vllm.py"))
        return _load("states_connector", ENGINE / "states_connector.py")
    finally:
        for name in set(sys.modules) - before:
            if name.startswith(("vllm", "states_connector")):
                monkeypatch.delitem(sys.modules, name)


def _load(name: str, path: Path) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Sides:
    """A scheduler's and a worker's connector, and the cache that a model would write."""

    def __init__(self, module: ModuleType, folder: Path, blocks: int = 8):
        folder.mkdir(exist_ok=True)
        extra = SimpleNamespace(get_from_extra_config=lambda key, default: str(folder))
        config = SimpleNamespace(kv_transfer_config=extra)
        spec = SimpleNamespace(block_size=BLOCK)
        attention = SimpleNamespace(
            layer_names=["model.layers.0"], kv_cache_spec=SimpleNamespace(block_size=16)
        )
        states = SimpleNamespace(layer_names=[CACHE], kv_cache_spec=spec)
        groups = SimpleNamespace(kv_cache_groups=[attention, states])
        self.scheduler = module.StatesConnector(config, "scheduler", groups)
        self.worker = module.StatesConnector(config, "worker", groups)
        self.cache = torch.full((blocks, LAYERS, BLOCK, HIDDEN), -1.0)
        self.worker.register_kv_caches({"model.layers.0": torch.empty(0), CACHE: self.cache})

    def write(self, slots: list[int], value: float) -> None:
        """One pass of a model: the n-th of these slots holds value + n, in layer l plus l / 10."""
        for n, slot in enumerate(slots):
            for layer in range(LAYERS):
                self.cache[slot // BLOCK, layer, slot % BLOCK] = value + n + layer / 10
        padded = torch.tensor([*slots, -1])
        self.worker.save_kv_layer("model.layers.0", None, SimpleNamespace(slot_mapping=torch.tensor([3])))
        self.worker.save_kv_layer(CACHE, None, SimpleNamespace(slot_mapping=padded))

    def end(self, name: str, token_ids: list[int], blocks: list[int], computed: int | None = None) -> Any:
        request = SimpleNamespace(
            request_id=name,
            prompt_token_ids=token_ids,
            num_computed_tokens=len(token_ids) if computed is None else computed,
        )
        return self.scheduler.request_finished_all_groups(request, ([99], blocks))

    def step(self, *ended: str) -> set[str] | None:
        self.worker.metadata = self.scheduler.build_connector_meta(None)
        done, received = self.worker.get_finished(set(ended))
        assert received is None
        self.worker.metadata = None
        return done


def test_states_of_exactly_the_prompts_tokens_are_written(module: ModuleType, tmp_path: Path) -> None:
    """A prompt of 6 in blocks 5 and 2, read in passes of 4 and 2; block 2 has room for two more."""
    sides = Sides(module, tmp_path / "out")
    sides.write([20, 21, 22, 23], 10.0)
    sides.write([8, 9], 14.0)
    kept, told = sides.end("7-0-ab", [40, 41, 42, 43, 44, 45], [5, 2])
    assert kept and told == {"file": str(tmp_path / "out" / "7-0-ab.safetensors")}
    assert sides.step("7-0-ab") == {"7-0-ab"}
    assert sides.step() is None  # told once
    sides.worker.shutdown()
    written = load_file(told["file"])
    assert written["token_ids"].tolist() == [40, 41, 42, 43, 44, 45]
    assert written["states"].shape == (6, LAYERS, HIDDEN)
    expected = 10 + torch.arange(6.0)[:, None] + torch.arange(3.0) / 10
    torch.testing.assert_close(written["states"], expected[..., None].expand(-1, -1, HIDDEN))
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["7-0-ab.safetensors"]


def test_a_request_that_was_given_up_is_not_kept(module: ModuleType, tmp_path: Path) -> None:
    sides = Sides(module, tmp_path / "out")
    assert sides.end("0-0-ab", [1, 2, 3], [1], computed=2) == (False, None)
    assert sides.step("0-0-ab") is None


def test_only_one_of_the_processes_that_share_a_model_writes(
    module: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda: 1)
    sides = Sides(module, tmp_path / "out")
    sides.write([4, 5], 1.0)
    sides.end("0-0-ab", [1, 2], [1])
    assert sides.step("0-0-ab") is None and sides.worker.get_finished_count() == 1
    sides.worker.shutdown()
    assert not list((tmp_path / "out").iterdir())


def test_blocks_of_another_size_are_refused(module: ModuleType, tmp_path: Path) -> None:
    sides = Sides(module, tmp_path / "out")
    with pytest.raises(ValueError, match="blocks of 8 tokens in the cache; expected 4"):
        sides.worker.register_kv_caches({CACHE: torch.zeros(2, LAYERS, 8, HIDDEN)})


@pytest.mark.parametrize(("written", "missing"), [([], 3), ([4, 6], 1)])
def test_a_slot_that_vllm_left_unwritten_ends_the_process(
    module: ModuleType,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    written: list[int],
    missing: int,
) -> None:
    """The block holds what the request before left there: nothing about the states would look wrong."""
    ended: list[int] = []
    monkeypatch.setattr(module.os, "_exit", ended.append)
    sides = Sides(module, tmp_path / "out")
    sides.write([4, 5, 6], 1.0)
    sides.end("0-0-ab", [1, 2, 3], [1])
    sides.step("0-0-ab")
    sides.write(written, 5.0)
    sides.end("1-0-ab", [1, 2, 3], [1])
    sides.step("1-0-ab")
    sides.worker.shutdown()
    assert ended == [1]
    assert f"request 1-0-ab: vLLM stored no states for {missing} of 3 tokens" in capsys.readouterr().err
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["0-0-ab.safetensors"]
