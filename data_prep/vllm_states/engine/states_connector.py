"""A KV connector for vLLM that writes the hidden states of each finished request to a file.

vLLM's method `extract_hidden_states` puts the asked states of every token into a cache of its own, next to
the KV caches, chunk by chunk as a prompt is read. What it does with them is a connector's choice. The one
that vLLM brings copies with CUDA streams and writes nothing elsewhere; this one runs on any device.

    scheduler   a request ends ──► its blocks are kept, and named to the worker in the next step
    worker      blocks ──► states of exactly the prompt's tokens, on the CPU ──► a thread writes the file

    FOLDER/REQUEST.safetensors    states     [n, layers, H]  in the model's dtype, layers by rising id
                                  token_ids  [n] int64

A file appears whole or not at all. vLLM can skip writing states without a word (where a request comes near
the end of the context), and a cache then holds what an earlier request left: the worker notes every slot
that is written, and a request with an unwritten one ends the process instead of being stored.

Written for the interface of vLLM 0.32 (distributed/kv_transfer/kv_connector/v1/base.py).
"""

from __future__ import annotations

import os
import sys
import traceback
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.distributed.parallel_state import get_tensor_model_parallel_rank

_CACHE = "cache_only_layers"  # how vLLM names the layer whose cache holds the states
_WRITERS = 4


@dataclass
class Ended:
    """A request that has read its whole prompt."""

    request: str
    file: str
    token_ids: list[int]
    blocks: list[int]


@dataclass
class StatesMetadata(KVConnectorMetadata):
    """From the scheduler to the workers, once a step."""

    ended: list[Ended] = field(default_factory=list)


class StatesConnector(KVConnectorBase_V1, SupportsHMA):
    """Both sides of the connector. Extra config: `folder`, where the files go."""

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any):
        super().__init__(vllm_config, role, kv_cache_config)
        self._folder = Path(self._kv_transfer_config.get_from_extra_config("folder", ""))
        groups = kv_cache_config.kv_cache_groups
        found = [i for i, group in enumerate(groups) if any(_CACHE in name for name in group.layer_names)]
        if len(found) != 1:
            raise ValueError(f"{len(found)} KV cache groups hold hidden states; expected one")
        self._group = found[0]
        self._block_size = groups[self._group].kv_cache_spec.block_size
        self._ended: list[Ended] = []  # scheduler: not yet told to the workers
        self._writes = True  # worker: the first of those that share the model
        self._cache = torch.empty(0)  # worker: [blocks, layers, block size, H]
        self._written = torch.empty(0)  # worker: [blocks * block size] bool, since it was last read
        self._threads = ThreadPoolExecutor(_WRITERS, thread_name_prefix="states")

    # The scheduler's side.

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        return 0, False  # nothing is ever loaded

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        pass

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Keeps the blocks until the worker has read them; the answer carries the file's path."""
        token_ids = list(request.prompt_token_ids)
        if request.num_computed_tokens < len(token_ids):
            return False, None  # given up before its prompt was read
        file = str(self._folder / f"{request.request_id}.safetensors")
        self._ended.append(Ended(request.request_id, file, token_ids, list(block_ids[self._group])))
        return True, {"file": file}

    def build_connector_meta(self, scheduler_output: Any) -> StatesMetadata:
        ended, self._ended = self._ended, []
        return StatesMetadata(ended)

    def get_finished_count(self) -> int:
        return 1  # of the processes that share the model one alone writes and reports

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str:
        return "LBNHC"  # the states of one token lie together

    # The worker's side.

    def register_kv_caches(self, kv_caches: dict[str, torch.Tensor]) -> None:
        names = [name for name in kv_caches if _CACHE in name]
        if len(names) != 1:
            raise ValueError(f"{len(names)} caches hold hidden states; expected one: {names}")
        self._writes = get_tensor_model_parallel_rank() == 0
        self._cache = kv_caches[names[0]]
        blocks, _, size, _ = self._cache.shape
        if size != self._block_size:
            raise ValueError(f"blocks of {size} tokens in the cache; expected {self._block_size}")
        self._written = torch.zeros(blocks * size, dtype=torch.bool, device=self._cache.device)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        pass

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Called for every layer of every pass; the cache has the states of these slots now."""
        if _CACHE in layer_name:
            slots = attn_metadata.slot_mapping.clamp_min(0)  # -1 is padding; block 0 is nobody's
            self._written[slots] = True

    def wait_for_save(self) -> None:
        pass

    def get_finished(self, finished_req_ids: set[str]) -> tuple[set[str] | None, None]:
        """Takes the states of the requests that ended in the step before; their blocks are free again."""
        if not self._writes or not self.has_connector_metadata():
            return None, None
        metadata = self._get_connector_metadata()
        assert isinstance(metadata, StatesMetadata)
        for ended in metadata.ended:
            self._take(ended)
        return {ended.request for ended in metadata.ended} or None, None

    def shutdown(self) -> None:
        self._threads.shutdown(wait=True)

    def _take(self, ended: Ended) -> None:
        count, device = len(ended.token_ids), self._cache.device
        if len(ended.blocks) * self._block_size < count:
            raise ValueError(f"{ended.request}: {len(ended.blocks)} blocks for {count} tokens")
        offsets = torch.arange(self._block_size)
        slots = (torch.tensor(ended.blocks)[:, None] * self._block_size + offsets).flatten()[:count]
        slots = slots.to(device, non_blocking=True)
        # Queued on the stream of the model, so whatever next writes to these blocks comes after.
        states = self._cache[slots // self._block_size, :, slots % self._block_size]  # [n, layers, H]
        written = self._written[slots]
        self._written[slots] = False
        copied = None
        if device.type == "cuda":
            states, written = _pinned(states), _pinned(written)
            copied = torch.cuda.Event()
            copied.record()
        self._threads.submit(_write, ended, states, written, copied).add_done_callback(_end_on_fault)


def _pinned(tensor: torch.Tensor) -> torch.Tensor:
    """A copy on its way to the CPU; it is there once the stream has come so far."""
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
    return copy.copy_(tensor, non_blocking=True)


def _write(ended: Ended, states: torch.Tensor, written: torch.Tensor, copied: Any) -> None:
    if copied is not None:
        copied.synchronize()
    missing = int((~written).sum())
    if missing:
        raise RuntimeError(
            f"request {ended.request}: vLLM stored no states for {missing} of {len(ended.token_ids)} tokens"
        )
    tensors = {"states": states.contiguous(), "token_ids": torch.tensor(ended.token_ids)}
    partial = Path(f"{ended.file}.part")
    save_file(tensors, str(partial))
    partial.replace(ended.file)


def _end_on_fault(written: Future[None]) -> None:
    """Ends the process with the fault in its log: nobody waits for what the thread returns."""
    fault = written.exception()
    if fault is not None:
        traceback.print_exception(fault)
        sys.stderr.flush()
        os._exit(1)
