"""The kernel floor of a step: the operations that the exact result needs, at the rates this machine reaches.

    floor = linear operations / matmul rate, of torch.mm or of ours, whichever is higher
            + attention operations / rate of causal SDPA, forward and backward

Counted are multiplications and additions of matrix products. T real slots (up to the last anchor), of which A
carry loss; M mask slots, all of which carry loss; E = A + M; P positions whose output of the target is some
element's label distribution. What the result does not need is not counted:

    fc          T rows and the one row of all mask slots; the stored states want no gradient
    layer 0     projections of the T real slots and of one mask row: all mask slots enter as the same row
    last layer  keys and values of all rows; queries, output projection and MLP only of the E rows with loss
    head        E rows
    target      P rows, once for all depths that share a position; forward only
    attention   (a, d) sees a + 1 real slots and d slots of its own chain; no pair outside of that. In layer 0
                the mask slots of one position ask the same query: each real slot answers it once

Backward costs twice the forward (gradient of the input, gradient of the weight). Attention costs two
products forward (scores, values) and five backward (scores again, and the gradients of the weights, values,
queries and keys): what a fused kernel does. The measured rate counts the same seven, so their number cancels.
Norms, RoPE, softmax, losses and all moving of memory are not counted: a floor of 1.0 is out of reach.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from peagle_train.head.batch import PackedBatch
from peagle_train.head.config import HeadConfig

MULTIPLY_ADD = 2
TRAINED = 3  # forward, gradient of the input, gradient of the weight
ATTENTION_PRODUCTS = 7  # 2 forward, 5 backward


@dataclass(frozen=True)
class Operations:
    """Operations of one step by term."""

    linear: dict[str, int]
    attention: dict[str, int]


def operations(config: HeadConfig, batch: PackedBatch, train_output: bool = True) -> Operations:
    """Counts a step of a P-EAGLE head with full attention in all layers.

    Raises:
        ValueError: the head is an eagle3 head, or has windows.
    """
    if config.method != "peagle" or any(config.windows):
        raise ValueError(
            f"a {config.method} head with windows {config.windows}: its operations are not counted"
        )
    real = sum(end - start for start, end in batch.slot_spans)
    masks, elements = batch.num_mask_slots, batch.num_supervised
    placeholder = min(masks, 1)
    width, queries = config.hidden_size, config.num_attention_heads * config.head_dim
    key_values = 2 * config.num_key_value_heads * config.head_dim

    def product(rows: int, inputs: int, outputs: int, times: int = TRAINED) -> int:
        return MULTIPLY_ADD * times * rows * inputs * outputs

    fc = product(real + placeholder, config.aux_width, width, times=2)  # forward and the weight
    fc += product(placeholder, config.aux_width, width, times=1)  # `mask_hidden`
    projections = outputs = mlp = 0
    for layer in range(config.num_layers):
        first, last = layer == 0, layer == config.num_layers - 1
        distinct = placeholder if first else masks
        asking = elements - masks + distinct if last else real + distinct
        inputs = 2 * width if first else width
        projections += product(asking, inputs, queries) + product(real + distinct, inputs, key_values)
        going_on = elements if last else real + masks
        outputs += product(going_on, queries, width)
        mlp += product(going_on, width, 3 * config.intermediate_size)
    linear = {
        "fc": fc,
        "projections": projections,
        "attention outputs": outputs,
        "MLP": mlp,
        "head": product(elements, width, config.draft_vocab_size, TRAINED if train_output else TRAINED - 1),
        "target": product(
            batch.output_row.unique().numel(), config.target_hidden_size, config.draft_vocab_size, times=1
        ),
    }
    causal, causal_last, prefix, entry, chain = _pairs(batch)
    layers = config.num_layers
    per_pair = MULTIPLY_ADD * ATTENTION_PRODUCTS * queries
    attention = {
        "real slots": per_pair * (causal * (layers - 1) + causal_last),
        "prefixes": per_pair * (prefix * (layers - 1) + entry),
        "chains": per_pair * chain * layers,
    }
    return Operations(linear, attention)


def _pairs(batch: PackedBatch) -> tuple[int, int, int, int, int]:
    """Pairs of query and key: real slots among themselves, of these the last layer's, prefixes, those of
    layer 0, chains."""
    slots = batch.num_slots
    # A real slot sees as many real slots as its position says, and itself.
    seen = batch.positions[batch.anchor] + 1
    with_loss = batch.supervised[batch.supervised < slots]
    causal = sum((end - start) * (end - start + 1) // 2 for start, end in batch.slot_spans)
    at = torch.stack([batch.document, batch.positions])[:, slots:]
    queries, kind = torch.unique(at, dim=1, return_inverse=True)
    farthest = torch.zeros(queries.shape[1], dtype=seen.dtype).scatter_reduce_(0, kind, seen[slots:], "amax")
    prefixes = int(seen[slots:].sum()), int(farthest.sum())
    return causal, int(seen[with_loss].sum()), *prefixes, int(batch.depth[slots:].sum())


def matmul_rate(multiply: Callable[[Tensor, Tensor], Tensor], size: int = 1024, times: int = 9) -> float:
    """Operations per CPU-second of a square float32 product; the median of `times`."""
    left, right = (torch.randn(size, size) for _ in range(2))
    seconds = []
    for _ in range(times):
        start = time.process_time()
        multiply(left, right)
        seconds.append(time.process_time() - start)
    return MULTIPLY_ADD * size**3 / statistics.median(seconds)


def attention_rate(config: HeadConfig, tokens: int, least_seconds: float = 0.5) -> float:
    """Operations per CPU-second of causal SDPA over `tokens`, forward and backward; the median."""
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    q, k, v = (torch.randn(1, h, tokens, width, requires_grad=True) for h in (heads, kv_heads, kv_heads))
    gradient = torch.randn(1, heads, tokens, width)
    seconds: list[float] = []
    while len(seconds) < 3 or sum(seconds) < least_seconds:
        start = time.process_time()
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=heads != kv_heads)
        torch.autograd.grad(out, (q, k, v), gradient)
        seconds.append(time.process_time() - start)
    pairs = tokens * (tokens + 1) // 2
    return MULTIPLY_ADD * ATTENTION_PRODUCTS * heads * width * pairs / statistics.median(seconds)
