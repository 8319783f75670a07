"""torch's flex_attention behind the two streams: compiled kernels for NVIDIA GPUs.

The rule (`attention.visible`) in closed form: a row sees one interval of the real slots and, a mask slot,
one of its own group's mask slots, which lie behind them as further keys:

    keys     0 ... first ......... last ... slots ... own_first ... slots + i
    row i          [ real slots it sees ]             [  own chain, itself   ]

So prefix and own chain are one softmax, and autograd gives every gradient. Which blocks of keys a block of
rows meets follows from the intervals' ends; a mask over all pairs never exists, and the blocks' own table
has (rows / 128) x (keys / 128) entries.

A kernel is compiled per pair of sizes, so rows and real slots are padded to buckets, two per octave:
lengths of all batches meet a few sizes, and a length seen for the first time compiles nothing once its
bucket is known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from peagle_train.head.causal import Spans
from peagle_train.head.chains import OwnChains
from peagle_train.head.prefix import SharedPrefix

BLOCK = 128
"""Rows and keys of a block, flex_attention's default."""

SIZES = 64
"""Pairs of sizes that may be compiled; torch's own limit of 8 would fall back to a full matrix of scores."""

KEPT = 16
"""Plans that are kept, for the layers to share: a batch's few windows and the groups in hand."""


@cache
def compiled() -> Callable[..., Any]:
    """flex_attention, compiled for the sizes it meets."""
    return torch.compile(flex_attention, dynamic=False)


def bucket(count: int) -> int:
    """The least of 128, 256, 384, 512, 768, 1024, 1536, ... that is not below `count`."""
    blocks = max(-(-count // BLOCK), 1)
    power = 1 << (blocks - 1).bit_length()
    return BLOCK * (power * 3 // 4 if power >= 4 and blocks <= power * 3 // 4 else power)


@dataclass(frozen=True)
class Plan:
    """What each row sees, padded to buckets. slots: real slots as keys; rows: rows, and own keys if any."""

    rows: int
    slots: int
    mask: BlockMask

    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, own_k: Tensor | None = None, own_v: Tensor | None = None
    ) -> Tensor:
        """q [m, Hq, D], k and v [Hkv, T, D], own keys and values [m, Hkv, D] -> [m, Hq, D]."""
        queries = F.pad(q, (0, 0, 0, 0, 0, self.rows - q.shape[0])).transpose(0, 1)
        keys, values = self._keys(k, own_k), self._keys(v, own_v)
        with torch.autocast(q.device.type, enabled=False), _sizes():
            out = compiled()(queries[None], keys[None], values[None], block_mask=self.mask, enable_gqa=True)
        return out[0].transpose(0, 1)[: q.shape[0]]

    def _keys(self, real: Tensor, own: Tensor | None) -> Tensor:
        """[Hkv, slots (+ rows), D], contiguous."""
        keys = F.pad(real, (0, 0, 0, self.slots - real.shape[1]))
        if own is None:
            return keys.contiguous()
        padded = F.pad(own, (0, 0, 0, 0, 0, self.rows - own.shape[0]))
        return torch.cat([keys, padded.transpose(0, 1)], 1)


class Plans:
    """The plans of one batch; layers of one window share theirs."""

    def __init__(self) -> None:
        self._kept: dict[Any, tuple[Plan, Any]] = {}

    def of_documents(self, spans: Spans, window: int | None, q: Tensor) -> Plan:
        """Real slots: causal within documents; padding rows see themselves."""
        key = tuple(spans), window, q.shape[0]
        return self._keep(key, None, lambda: _of_documents(spans, window, q.shape[0], q.device))

    def of_prefix(self, prefix: SharedPrefix, chains: OwnChains | None, slots: int) -> Plan:
        """Rows with a prefix of `slots` real slots, and own chains of neighbouring rows if they have any."""
        # Layer 0 shares the plan of its window. Identity tells rows apart as long as they are held.
        held = prefix, chains
        return self._keep(
            (id(prefix.anchor), id(chains), prefix.window), held, lambda: _of_prefix(prefix, chains, slots)
        )

    def _keep(self, key: Any, held: Any, make: Callable[[], Plan]) -> Plan:
        if key not in self._kept:
            while len(self._kept) >= KEPT:
                del self._kept[next(iter(self._kept))]
            self._kept[key] = make(), held
        return self._kept[key][0]


def _of_documents(spans: Spans, window: int | None, count: int, device: torch.device) -> Plan:
    first, last = torch.arange(count), torch.arange(count)
    for start, end in spans:
        first[start:end] = start
    if window is not None:
        first = torch.maximum(first, last - window + 1)
    return _plan(first.to(device), last.to(device), None, count)


def _of_prefix(prefix: SharedPrefix, chains: OwnChains | None, slots: int) -> Plan:
    first = torch.empty(prefix.anchor.shape[0], dtype=torch.int64)
    for block in prefix.blocks:
        first[slice(*block.rows)] = block.document
    first = first.to(prefix.anchor.device)
    if prefix.window is not None:
        first = torch.maximum(first, prefix.anchor + prefix.depth - prefix.window + 1)
    if chains is not None and chains.stride != 1:
        raise ValueError(f"own chains of stride {chains.stride}; flex knows those of neighbouring rows")
    return _plan(first, prefix.anchor, None if chains is None else chains.lengths, slots)


def _plan(first: Tensor, last: Tensor, lengths: Tensor | None, slots: int) -> Plan:
    """Pads intervals [m] to buckets. A row added sees its own key, or where there are none the first slot."""
    count, device = first.shape[0], first.device
    rows, slots = bucket(count), bucket(slots)
    first = F.pad(first, (0, rows - count)).int()
    last = F.pad(last, (0, rows - count), value=0 if lengths is None else -1).int()
    own = None
    if lengths is not None:
        itself = slots + torch.arange(rows, device=device)
        own = (itself + 1 - F.pad(lengths, (0, rows - count), value=1)).int()
    return Plan(rows, slots, _block_mask(first, last, own, rows, slots))


def _block_mask(first: Tensor, last: Tensor, own: Tensor | None, rows: int, slots: int) -> BlockMask:
    """The blocks that rows meet, from the ends of their intervals, and the rule within a block."""
    keys = slots if own is None else slots + rows
    low = torch.arange(0, keys, BLOCK, device=first.device)
    high, real = low + BLOCK - 1, low < slots
    starts, ends = first.view(-1, BLOCK), last.view(-1, BLOCK)
    # May hold a key that some row sees: never too few, and within it the rule decides.
    met = (starts.amin(1)[:, None] <= high) & (ends.amax(1)[:, None] >= low) & real
    whole = (starts.amax(1)[:, None] <= low) & (ends.amin(1)[:, None] >= high) & real
    if own is None:
        sees = _prefix(first, last)
    else:
        itself = slots + torch.arange(BLOCK - 1, rows, BLOCK, device=first.device)
        met |= (own.view(-1, BLOCK).amin(1)[:, None] <= high) & (itself[:, None] >= low) & ~real
        sees = _prefix_and_chain(first, last, own, slots)
    return BlockMask.from_kv_blocks(
        *_listed(met & ~whole), *_listed(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(rows, keys)
    )


Sees = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
"""flex_attention's question: (batch, head, row, key) -> whether the row sees the key."""


def _prefix(first: Tensor, last: Tensor) -> Sees:
    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        return (key >= first[row]) & (key <= last[row])

    return sees


def _prefix_and_chain(first: Tensor, last: Tensor, own: Tensor, slots: int) -> Sees:
    def sees(batch: Tensor, head: Tensor, row: Tensor, key: Tensor) -> Tensor:
        prefix = (key >= first[row]) & (key <= last[row])
        return prefix | ((key >= own[row]) & (key <= row + slots))

    return sees


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of keys each block of rows has, [1, 1, R], and which, first in line [1, 1, R, C]."""
    order = torch.argsort(blocks.int(), dim=-1, descending=True, stable=True).int()
    return blocks.sum(-1, dtype=torch.int32)[None, None], order[None, None]


def _sizes() -> Any:
    """Lets torch compile as many sizes as there are buckets."""
    import torch._dynamo  # a second to import: only where something is compiled

    return torch._dynamo.config.patch(recompile_limit=SIZES)
