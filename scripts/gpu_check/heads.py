"""Training steps at the sizes of real heads: memory against the plan, tokens per second."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import torch
from rich.table import Table
from torch import nn

from peagle_train.errors import PeagleError
from peagle_train.head.batch import PackedBatch, pack
from peagle_train.head.choose import missing
from peagle_train.head.config import HeadConfig
from peagle_train.head.memory import footprint
from peagle_train.head.model import DrafterHead
from peagle_train.head.rope import Rope
from peagle_train.head.sampling import kept_shares
from peagle_train.training.memory import (
    GIB,
    MemoryPlan,
    device_budget,
    peak_bytes,
    plan_memory,
    reset_peak,
    resident_bytes,
    states_bytes,
)
from peagle_train.training.module import DraftTraining
from peagle_train.training.wrapped import StepModule
from scripts.gpu_check.backends import COD_RATE, document, need
from scripts.gpu_check.lines import Check, Failed, Settings, Skip, skip

POSITIONS = 8
TOKENS = (8192, 20_000)
STEPS = 2
"""Timed steps, after one that compiles and makes the optimizer's moments."""

OVER_PLAN = 1.1
"""Measured peak over planned peak from which a plan is no plan."""

PLANNED_ON = 80 * 10**9
"""Bytes of the GPU that `--plan` plans for."""


def _head(
    hidden: int, heads: int, kv_heads: int, dim: int, mlp: int, vocabulary: int, theta: float
) -> HeadConfig:
    return HeadConfig(
        hidden_size=hidden,
        intermediate_size=mlp,
        num_layers=4,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=dim,
        vocab_size=vocabulary,
        draft_vocab_size=vocabulary,
        target_hidden_size=hidden,
        aux_layers=(2, 12, 21),
        mask_token_id=vocabulary - 1,
        rms_norm_eps=1e-5,
        rope=Rope(theta),
        max_position_embeddings=131_072,
        own_embeddings=True,
    )


HEADS = {
    "GPT-OSS-20B": _head(2880, 64, 8, 64, 2880, 201_088, 150_000.0),
    "Qwen3-Coder": _head(2048, 32, 4, 128, 5472, 151_936, 1e7),
}
"""Heads of four layers with the targets' own widths, attention and vocabularies."""

REDUCED = 32_000
TINY = replace(
    HEADS["GPT-OSS-20B"],
    hidden_size=64,
    intermediate_size=96,
    num_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    vocab_size=512,
    draft_vocab_size=512,
    target_hidden_size=64,
    mask_token_id=511,
)


def cases(tiny: bool) -> Iterator[tuple[str, HeadConfig, int]]:
    """Name, head and tokens of each case."""
    heads = {"tiny": TINY} if tiny else HEADS
    for (name, config), reduced, tokens in product(
        heads.items(), (True, False), (160, 400) if tiny else TOKENS
    ):
        draft = (128 if tiny else REDUCED) if reduced else config.vocab_size
        yield (
            f"{name}, draft vocabulary {draft:,}, {tokens:,} tokens",
            replace(config, draft_vocab_size=draft),
            tokens,
        )


def heads(settings: Settings, backend: str) -> Iterator[Check]:
    """Steps in bfloat16 with one backend."""
    if (lacking := missing(backend, torch.device(settings.device), torch.bfloat16)) is not None:
        yield "all", partial(skip, lacking[0])
        return
    for name, config, tokens in cases(settings.tiny):
        yield name, partial(_step, torch.device(settings.device), config, tokens, backend)


def _step(device: torch.device, config: HeadConfig, tokens: int, backend: str) -> tuple[str, dict[str, Any]]:
    with torch.device("meta"):
        shape = DrafterHead(config)
    need(backend, device, torch.bfloat16, shape)
    budget = device_budget(device, 1)
    try:
        plan(shape, tokens, backend, device, budget, resident_bytes(device) + _weights(config))
    except PeagleError as error:
        raise Skip(f"this device is too small: {error}") from error
    try:
        return _measure(device, config, tokens, backend, budget)
    finally:
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()


def plan(
    head: DrafterHead, tokens: int, backend: str, device: torch.device, budget: int, resident: int
) -> MemoryPlan:
    """Of a training in bfloat16 on this device; gradients and AdamW's moments are float32."""
    return plan_memory(
        head,
        longest=tokens,
        shares=kept_shares(POSITIONS, COD_RATE),
        device=device,
        half=True,
        backend=backend,
        budget=budget,
        resident=resident,
        states=states_bytes(head, "one", 1),
    )


def _weights(config: HeadConfig) -> int:
    """Bytes of the head, float32, and of the target's output, bfloat16."""
    with torch.device("meta"):
        head = sum(p.numel() * p.element_size() for p in DrafterHead(config).parameters())
    return head + 2 * config.draft_vocab_size * config.target_hidden_size


def _measure(
    device: torch.device, config: HeadConfig, tokens: int, backend: str, budget: int
) -> tuple[str, dict[str, Any]]:
    torch.manual_seed(0)
    batch = pack([document(config, tokens + 1, 0, POSITIONS)]).to(device)
    with torch.device(device):
        head = DrafterHead(config)
        output = nn.Linear(
            config.target_hidden_size, config.draft_vocab_size, bias=False, dtype=torch.bfloat16
        )
    planned = plan(head, batch.num_slots, backend, device, budget, resident_bytes(device))
    training = DraftTraining(head, output, POSITIONS, "kl", engine=planned.settings)
    step = StepModule(training, "bf16", device)
    optimizer = torch.optim.AdamW([p for p in head.parameters() if p.requires_grad], lr=1e-5, fused=True)
    reset_peak(device)
    _take(step, optimizer, batch)
    _wait(device)
    start = time.monotonic()
    for _ in range(STEPS):
        loss = _take(step, optimizer, batch)
    _wait(device)
    seconds = (time.monotonic() - start) / STEPS
    numbers: dict[str, Any] = {
        "tokens": batch.num_slots,
        "elements": batch.num_supervised,
        "tokens_per_second": batch.num_slots / seconds,
        "seconds": seconds,
        "planned": planned.peak,
        "peak": peak_bytes(device),
        "resident": planned.resident,
        "group_rows": planned.settings.group_rows,
        "loss_rows": planned.settings.loss_rows,
    }
    peak = numbers["peak"]
    text = f"{numbers['tokens_per_second']:,.0f} tokens/s"
    if peak is not None:
        text += f"; peak {peak / GIB:.2f} GiB, planned {planned.peak / GIB:.2f}"
    if not torch.isfinite(loss):
        raise Failed(f"the loss is {loss.item()}; {text}")
    if peak is not None and peak > OVER_PLAN * planned.peak:
        raise Failed(f"more than {OVER_PLAN} times the plan: {text}")
    return text, numbers


def _take(step: StepModule, optimizer: torch.optim.Optimizer, batch: PackedBatch) -> torch.Tensor:
    loss, count, _, _ = step(batch)
    (loss / count).backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return loss.detach()


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def plans() -> tuple[Table, Table]:
    """The memory plans of all cases on a GPU of PLANNED_ON bytes, and what they count; allocates nothing."""
    gpu = f"a GPU of {PLANNED_ON / 1e9:.0f} GB"
    title = f"Memory plans, GiB; K = {POSITIONS}, bfloat16 over float32 weights, {gpu}"
    made, units = Table(title=title), Table(title="Bytes per unit (head/memory.py), before the plan's slack")
    _columns(made, "head", "weights", "states", "real slots", "rest", "peak", "group", "chunk")
    _columns(units, "head", "real slot", "mask slot", "passing", "element", "layers' weights")
    for name, config, tokens in cases(tiny=False):
        with torch.device("meta"):
            head = DrafterHead(config)
        if tokens == TOKENS[0]:
            unit = footprint(config, 2, 4)
            counts = (unit.real_slot, unit.mask_slot, unit.passing_mask, unit.element, unit.group)
            units.add_row(name.rsplit(", ", 1)[0], *(f"{count:,}" for count in counts))
        try:
            it = plan(head, tokens, "sdpa", torch.device("cuda"), PLANNED_ON, _weights(config))
        except PeagleError as error:
            made.add_row(name, str(error))
            continue
        parts = (it.resident, it.states, it.real, it.step, it.peak)
        cut = (f"{it.settings.group_rows:,}", f"{it.settings.loss_rows:,}")
        made.add_row(name, *(f"{part / GIB:.2f}" for part in parts), *cut)
    return made, units


def _columns(table: Table, first: str, *others: str) -> None:
    table.add_column(first)
    for title in others:
        table.add_column(title, justify="right")
