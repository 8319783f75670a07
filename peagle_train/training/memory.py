"""The memory plan: how a batch is cut so that a process stays within its budget.

Made once, before step 1, and printed; kept in every checkpoint and used again on resume, because another
cut rounds otherwise and the run would no longer be bit for bit the one that was interrupted. The byte counts
are `head/memory.py`'s; what is there already when the plan is made (libraries, weights, the target's output)
is measured. On a GPU memory is what torch has allocated there, on a CPU what the process has resident.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from peagle_train.errors import PeagleError
from peagle_train.head.engine import EngineSettings, trained_parameters
from peagle_train.head.memory import footprint
from peagle_train.head.model import DrafterHead
from peagle_train.head.sampling import kept_shares
from peagle_train.recipe.schema import TrainSection

GIB = 2**30
SHARE = {"cpu": 0.5, "cuda": 0.9}
"""Of the memory that is free on the device, how much a training takes where the recipe names no budget."""

ROWS = {"cpu": 2048, "cuda": 16384}
"""Mask slots of a group where memory is no matter: large enough that every operator is busy."""

LOGITS = {"cpu": 2**21, "cuda": 2**27}
"""Logits of a loss chunk where memory is no matter."""

SLACK = 1.1
"""Allocators round sizes up and leave holes."""

LEAST_ROWS, LEAST_ELEMENTS = 64, 16
"""The smallest cut: below it an operator's start costs more than its work."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of one process at its peak, by what they are for."""

    budget: int
    resident: int  # when the plan was made: libraries, weights, the target's output
    states: int  # gradients and AdamW's moments
    real: int  # the real slots' graph, with their targets and inputs
    step: int  # the rest of a step: groups, chunks, what passes backwards
    longest: int  # real slots of the largest batch
    settings: EngineSettings
    one_graph: bool  # eagle3: `group_rows` are all there are
    saving: int = 0  # on a CPU: moments and a checkpoint's copies; no step runs then, and gradients are gone

    @property
    def peak(self) -> int:
        return self.resident + max(self.states + self.real + self.step, self.saving)

    def table(self) -> Table:
        """The plan to look at."""
        cut = self.settings
        table = Table(title="memory of one process", show_header=False, title_justify="left")
        table.add_column()
        table.add_column(justify="right")
        table.add_row("libraries, weights, target's output (measured)", _gib(self.resident))
        table.add_row("gradients and optimizer", _gib(self.states))
        table.add_row(f"real slots, {self.longest:,} of them", _gib(self.real))
        slots = (
            f"{cut.group_rows:,} steps of chains" if self.one_graph else f"mask slots by {cut.group_rows:,}"
        )
        table.add_row(f"{slots}, logits by {cut.loss_rows:,} rows", _gib(self.step))
        if self.saving:
            table.add_row("or optimizer and a checkpoint being written", _gib(self.saving))
        table.add_row("peak", _gib(self.peak), style="bold")
        table.add_row("budget", _gib(self.budget))
        return table


def plan_memory(
    head: DrafterHead,
    *,
    longest: int,
    shares: Sequence[float],
    device: torch.device,
    half: bool,
    backend: str,
    budget: int,
    resident: int,
    states: int,
    cut: EngineSettings | None = None,
) -> MemoryPlan:
    """The largest cut, up to what is useful, whose peak fits.

    Args:
        head: the drafter.
        longest: real slots of the largest batch.
        shares: of the chains that are kept at depths 1, 2, ... (`sampling.kept_shares`).
        half: whether it computes in bfloat16.
        backend: name of the attention backend.
        budget, resident: bytes one process may use, and uses already.
        states: bytes of gradients and optimizer in this process.
        cut: the plan of this one instead; it was made for the run that goes on.

    Raises:
        PeagleError: the smallest cut does not fit; says what would.
    """
    parameters = trained_parameters(head)
    weight = parameters[0].element_size()
    masks = sum(shares)  # per real slot, at most
    mean_depth = sum(d * share for d, share in enumerate(shares, 1)) / max(masks, 1)
    unit = footprint(head.config, 2 if half else weight, weight, mean_depth)
    most_rows = math.ceil(longest * masks)
    whole = unit.one_graph  # an unroll is not cut
    rows = max(most_rows if whole else min(ROWS.get(device.type, ROWS["cuda"]), most_rows), 1)
    elements = max(LOGITS.get(device.type, LOGITS["cuda"]) // head.config.draft_vocab_size, LEAST_ELEMENTS)
    elements = min(elements, longest + most_rows)
    saving = saving_bytes(head) if device.type == "cpu" else 0

    def plan(rows: int, elements: int) -> MemoryPlan:
        real = int(SLACK * unit.real_slot * longest)
        step = int(SLACK * unit.step(longest, rows, elements)) - real
        settings = EngineSettings(rows, elements, backend)
        return MemoryPlan(budget, resident, states, real, step, longest, settings, whole, saving)

    if cut is not None:
        return plan(cut.group_rows or most_rows, cut.loss_rows)
    while plan(rows, elements).peak > budget:
        # What weighs more gives way first.
        large_rows = (unit.mask_slot + unit.passing_mask) * rows > unit.element * elements
        if not whole and rows > LEAST_ROWS and (large_rows or elements <= LEAST_ELEMENTS):
            rows = max(rows // 2, LEAST_ROWS)
        elif elements > LEAST_ELEMENTS:
            elements = max(elements // 2, LEAST_ELEMENTS)
        else:
            slot = unit.real_slot + (masks * unit.mask_slot + unit.passing_real if whole else 0)
            _refuse(plan(rows, elements), int(SLACK * slot))
    return plan(rows, elements)


def _refuse(plan: MemoryPlan, slot: int) -> None:
    """slot: bytes that grow with each token of a batch."""
    room = plan.budget - (plan.peak - slot * plan.longest)
    cure = (
        f"A batch of {room // slot:,} tokens would fit: lower train.batch_tokens, or data's lengths if "
        "a single row is longer; or raise"
        if room > slot
        else "Not even a batch of one token would fit: raise"
    )
    raise PeagleError(
        f"train.memory: a batch of {plan.longest:,} tokens needs {_gib(plan.peak)} in one process with the "
        f"smallest cut, and the budget is {_gib(plan.budget)}. {cure} train.memory."
    )


def settle_engine(
    stored: EngineSettings | None,
    head: DrafterHead,
    section: TrainSection,
    longest: int,
    device: torch.device,
    *,
    backend: str,
    states: int,
    output: int,
    processes: int,
) -> MemoryPlan:
    """The plan of a run that begins, or that of a run that goes on with the cut it began with.

    Args:
        stored: the cut in the checkpoint.
        head: before it is wrapped, so its weights may still be on their way to the device.
        section: the recipe's.
        longest: real slots of the largest batch.
        device: where it trains.
        backend: that was chosen for the device (`head/choose.py`).
        states: bytes of gradients and optimizer in one process.
        output: bytes of the target's output layer, which goes to the device with the head.
        processes: on this machine.
    """
    resident = resident_bytes(device)
    if device.type != "cpu":
        resident += weights_bytes(head) + output
    asked = section.memory
    budget = int(asked * GIB) if asked is not None else device_budget(device, processes)
    return plan_memory(
        head,
        longest=longest,
        shares=kept_shares(section.positions, section.cod.rate, section.cod.floor),
        device=device,
        half=section.precision == "bf16",
        backend=backend,
        budget=budget,
        resident=resident,
        states=states,
        cut=stored,
    )


def doubts(plan: MemoryPlan, device: torch.device, *, half: bool, kept: bool) -> list[str]:
    """What may make a plan untrue.

    Args:
        plan: of this run.
        device: where it trains.
        half: whether it computes in bfloat16.
        kept: whether the cut is that of a checkpoint.
    """
    found = []
    total = torch.cuda.mem_get_info(device)[1] if device.type == "cuda" else _meminfo("MemTotal")
    if total is not None and plan.budget > total:
        found.append(f"train.memory: {_gib(plan.budget)}, and the whole device has {_gib(total)}")
    if kept and plan.peak > plan.budget:
        found.append(
            f"train.memory: {_gib(plan.budget)}, but {_gib(plan.peak)} are needed: a training that goes on "
            "keeps the cut that it began with"
        )
    if half and device.type == "cpu":
        found.append(
            "train.precision bf16 on a CPU: oneDNN keeps buffers for every new shape, which no plan counts; "
            "fp32 does not"
        )
    return found


def device_budget(device: torch.device, processes: int) -> int:
    """Bytes one of `processes` of this machine may use where the recipe names no budget."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(SHARE["cuda"] * (free + torch.cuda.memory_reserved(device)))
    return resident_bytes(device) + int(SHARE["cpu"] * _available()) // processes


def resident_bytes(device: torch.device) -> int:
    """Bytes this process uses on the device now."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return _status("VmRSS") or 0


def reset_peak(device: torch.device) -> None:
    """Starts a new measurement of `peak_bytes`."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    # Where this is not Linux, or not allowed, the peak stays the process's since its start.
    with suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")


def peak_bytes(device: torch.device) -> int | None:
    """The most this process used since `reset_peak`; None where the system does not tell."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return _status("VmHWM")


def states_bytes(head: DrafterHead, kind: str, world: int) -> int:
    """Bytes of gradients and optimizer in one process, under a wrapping (`Wrapped.found`) of `world`.

    ZeRO holds master weights beside the moments, and splits both; its later stages and FSDP2 split gradients.
    """
    weights = sum(p.numel() * p.element_size() for p in trained_parameters(head))
    gradients, moments = weights, 2 * weights
    if kind.startswith("zero"):
        moments = 3 * weights // world
    if kind in ("zero2", "zero3", "fsdp2"):
        gradients = weights // world
    if kind == "fsdp2":
        moments //= world
    # The engine's own sums of gradients are whole until they are handed out.
    return moments + max(gradients, weights if world > 1 else 0)


def saving_bytes(head: DrafterHead) -> int:
    """Bytes on a CPU while a checkpoint is written: moments, and copies of them and of the weights."""
    moments = 2 * sum(p.numel() * p.element_size() for p in trained_parameters(head))
    return 2 * moments + weights_bytes(head)


def weights_bytes(head: DrafterHead) -> int:
    """Bytes of a head with its tables and maps."""
    return sum(t.numel() * t.element_size() for t in head.state_dict().values())


def report_peak(plan: MemoryPlan, device: torch.device, console: Console) -> None:
    """Says what was used, and warns if that was more than planned."""
    peak = peak_bytes(device)
    if peak is None:
        return
    text = f"memory: {_gib(peak)} at the peak, {_gib(plan.peak)} planned, {_gib(plan.budget)} allowed"
    over = peak > plan.budget
    console.print(f"warning: {text}" if over else text, style="yellow" if over else None, highlight=False)


def _available() -> int:
    return _meminfo("MemAvailable") or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _meminfo(key: str) -> int | None:
    return _bytes_of("/proc/meminfo", key)


def _status(key: str) -> int | None:
    return _bytes_of("/proc/self/status", key)


def _bytes_of(file: str, key: str) -> int | None:
    """A line `key: N kB`; None where the system has no such file, or it no such line."""
    try:
        text = Path(file).read_text(encoding="ascii")
    except OSError:
        return None
    return next((int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith(key)), None)


def _gib(count: int) -> str:
    return f"{count / GIB:.2f} GiB"
