"""A KV cache that grows in place.

Transformers' own growing cache concatenates at every step, which copies all earlier keys and values
of every layer for each new token: in batched decoding on a CPU that costs as much as the arithmetic.
Here each layer owns a buffer with spare room, new entries are written behind the old ones, and
attention reads a view. The buffer doubles when it is full, so each entry is copied about once.

Sliding-window layers are stored whole as well. Their window is enforced by the attention mask, which
transformers builds from the length that the cache reports; keeping everything is what makes `crop`
exact after any number of tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from transformers.cache_utils import Cache, DynamicLayer

_FIRST_CAPACITY = 128


class _GrowingLayer(DynamicLayer):
    """One decoder layer: `keys` and `values` are views [B, heads, length, D] of the buffers."""

    stored = 0
    key_buffer: torch.Tensor  # [B, heads, capacity, D]; exists once initialised
    value_buffer: torch.Tensor

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.device, self.dtype = key_states.device, key_states.dtype
        self.key_buffer = _grown(key_states[:, :, :0], _FIRST_CAPACITY)
        self.value_buffer = _grown(value_states[:, :, :0], _FIRST_CAPACITY)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Appends keys and values [B, heads, S, D]; returns all of them."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        start, stop = self.stored, self.stored + key_states.shape[2]
        if stop > self.key_buffer.shape[2]:
            capacity = max(stop, 2 * self.key_buffer.shape[2])
            self.key_buffer = _grown(self.key_buffer[:, :, :start], capacity)
            self.value_buffer = _grown(self.value_buffer[:, :, :start], capacity)
        self.key_buffer[:, :, start:stop] = key_states
        self.value_buffer[:, :, start:stop] = value_states
        return self.keep_first(stop)

    def get_seq_length(self) -> int:
        return self.stored

    def keep_first(self, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Forgets all but the first `length` positions; returns the keys and values that are left."""
        self.stored = length
        keys, values = self.key_buffer[:, :, :length], self.value_buffer[:, :, :length]
        self.keys, self.values = keys, values
        return keys, values

    def keep_rows(self, rows: torch.Tensor, start: int) -> None:
        """Keeps the batch rows `rows` [R], and of those the positions from `start` on."""
        rows, capacity = rows.to(self.device), self.key_buffer.shape[2]
        self.key_buffer = _grown(self.key_buffer[:, :, start : self.stored][rows], capacity)
        self.value_buffer = _grown(self.value_buffer[:, :, start : self.stored][rows], capacity)
        self.keep_first(self.stored - start)


class KeyValueCache(Cache):
    """The cache of all decoder layers. Used by `Target.forward`; `length` counts stored positions."""

    def __init__(self) -> None:
        super().__init__(layer_class_to_replicate=_GrowingLayer)

    @property
    def length(self) -> int:
        return self.get_seq_length()

    def crop(self, length: int) -> None:
        """Keeps the first `length` positions of every layer. Raises ValueError outside 0..length."""
        if not 0 <= length <= self.length:
            raise ValueError(f"crop({length}): the cache holds {self.length} positions")
        for layer in self._growing_layers():
            layer.keep_first(length)

    def select(self, rows: torch.Tensor, start: int = 0) -> None:
        """Keeps the batch rows `rows` [R] (in that order), and of those the positions from `start` on.

        `start` drops columns that are padding in every kept row. Positions already carry their RoPE
        rotation, so nothing moves but the storage; the caller's attention mask must be cut alike.
        """
        if not 0 <= start <= self.length:
            raise ValueError(f"select(start={start}): the cache holds {self.length} positions")
        for layer in self._growing_layers():
            layer.keep_rows(rows, start)

    def _growing_layers(self) -> list[_GrowingLayer]:
        """The layers that hold something; classes that share keys between layers leave some empty."""
        return [layer for layer in self.layers if isinstance(layer, _GrowingLayer) and layer.is_initialized]


def _grown(states: torch.Tensor, capacity: int) -> torch.Tensor:
    """A buffer [B, heads, capacity, D] that starts with `states` [B, heads, n, D]."""
    batch, heads, length, width = states.shape
    buffer = states.new_empty(batch, heads, capacity, width)
    buffer[:, :, :length] = states
    return buffer
