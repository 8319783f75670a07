"""As much of vLLM as runner.py and states_connector.py touch, without a model: see test_vllm_backend.py.

The state of token t at layer l is t + l / 100 in every dimension. A row's file comes one step after the row
has ended, as in vLLM. FAKE_VLLM in the environment plants a fault: "broken" does not start, "dies at N" ends
with batch N, "garbles" gives states of other tokens, "cuda" runs on another device.
"""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy
from safetensors.numpy import save_file

__version__ = "0.32.0"
_FAULT = os.environ.get("FAKE_VLLM", "")


class SamplingParams:
    def __init__(self, **settings: Any):
        assert settings["max_tokens"] == 1


class LLM:
    def __init__(self, **settings: Any):
        if _FAULT == "broken":
            raise ValueError("the fake vLLM does not start")
        print("noise that is no reply")
        extraction = settings["speculative_config"]["draft_model_config"]["hf_config"]
        self.llm_engine = Engine(
            extraction["eagle_aux_hidden_state_layer_ids"],
            json.loads((Path(settings["model"]) / "config.json").read_text())["hidden_size"],
            Path(settings["kv_transfer_config"]["kv_connector_extra_config"]["folder"]),
        )


class Engine:
    def __init__(self, layers: list[int], hidden: int, folder: Path):
        self.layers, self.hidden, self.folder = layers, hidden, folder
        self.asked: list[tuple[str, list[int]]] = []
        self.ended: list[tuple[Path, list[int]]] = []

    def add_request(self, name: str, prompt: dict[str, list[int]], sampling: SamplingParams) -> None:
        batch = name.partition("-")[0]
        if _FAULT.startswith("dies") and _FAULT.endswith(batch):
            print("the fake vLLM dies", file=sys.stderr, flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        self.asked.append((name, prompt["prompt_token_ids"]))

    def step(self) -> list[SimpleNamespace]:
        for file, token_ids in self.ended:
            self.write(file, token_ids)
        self.ended = []
        if not self.asked:
            return []
        name, token_ids = self.asked.pop()  # the last first: rows do not end in the order they came
        file = self.folder / f"{name}-0a1b.safetensors"
        self.ended.append((file, token_ids))
        return [SimpleNamespace(request_id=name, finished=True, kv_transfer_params={"file": str(file)})]

    def write(self, file: Path, token_ids: list[int]) -> None:
        if _FAULT == "garbles":
            token_ids = token_ids[::-1]
        tokens = numpy.array(token_ids)
        states = tokens[:, None, None] + numpy.array(self.layers)[None, :, None] / 100
        wide = numpy.broadcast_to(states, (*states.shape[:2], self.hidden)).astype("float32")
        partial = file.with_suffix(".part")
        save_file({"states": wide.copy(), "token_ids": tokens}, partial)
        partial.replace(file)


class KVConnectorBase_V1:
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        self._kv_transfer_config = vllm_config.kv_transfer_config
        self.metadata: Any = None

    def has_connector_metadata(self) -> bool:
        return self.metadata is not None

    def _get_connector_metadata(self) -> Any:
        return self.metadata


def _module(name: str, **content: Any) -> None:
    module = sys.modules[f"vllm.{name}"] = ModuleType(f"vllm.{name}")
    module.__dict__.update(content)


_platform = SimpleNamespace(device_type="cuda" if _FAULT == "cuda" else "cpu")
_registry = SimpleNamespace()
_module("platforms", current_platform=_platform)
_module("model_executor")
_module("model_executor.models", registry=_registry)
_module("distributed", cleanup_dist_env_and_memory=lambda: None)
_module("distributed.parallel_state", get_tensor_model_parallel_rank=lambda: 0)
_module("distributed.kv_transfer")
_module("distributed.kv_transfer.kv_connector")
_module("distributed.kv_transfer.kv_connector.v1")
_module(
    "distributed.kv_transfer.kv_connector.v1.base",
    KVConnectorBase_V1=KVConnectorBase_V1,
    KVConnectorMetadata=type("KVConnectorMetadata", (), {}),
    SupportsHMA=type("SupportsHMA", (), {}),
)
