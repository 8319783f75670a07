"""One side as a process: commands come in as JSON lines, answers go out as JSON lines.

    {"do": "build", "shape": {...}}    model and optimizer; a small step to warm up    -> what it trains
    {"do": "load", "tokens": S}        the document; one step that measures memory      -> Memory
    {"do": "step", "draw": i}          one timed step with COD draw i                   -> Step
    {"do": "floor", "draw": i}         (ours) operations of that step, rates of this machine

CPU-seconds are those of the whole process. Memory is the peak of resident memory within a step less what
was resident before it: the program, the document, weights, AdamW's moments, and gradients, which are kept
from the step before, as when micro-batches add up. Timed steps start without gradients, as a trainer's do.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch

from scripts.side_by_side.case import Case, Outcome, Shape, make_case


class Side(Protocol):
    """A model and its training step."""

    def trained(self) -> dict[str, torch.nn.Parameter]: ...

    def versions(self) -> dict[str, str]: ...

    def step(self, case: Case, draw: int) -> Outcome:
        """Forward and backward over the document; leaves the gradients."""

    def floor(self, case: Case, draw: int) -> dict[str, Any]:
        """Operations and rates; ours alone knows them."""


@dataclass(frozen=True)
class Step:
    """One timed step."""

    cpu_seconds: float
    wall_seconds: float
    outcome: Outcome


@dataclass(frozen=True)
class Memory:
    """Of one step, in bytes. process: the peak of the whole process."""

    above_static: int
    process: int


WARM_UP_TOKENS = 64


class Measured:
    """A side with its optimizer, and the document of the moment."""

    def __init__(self, shape: Shape, side: Side):
        self.shape, self.side = shape, side
        self.case = make_case(shape, WARM_UP_TOKENS)
        # Only its moments matter, which are static state; with these rates it changes nothing.
        self.optimizer = torch.optim.AdamW(side.trained().values(), lr=0.0, weight_decay=0.0)
        side.step(self.case, draw=0)
        self.optimizer.step()

    def load(self, tokens: int) -> Memory:
        self.case = make_case(self.shape, tokens)
        self.optimizer.zero_grad(set_to_none=False)
        _return_freed_memory()
        before = _resident("VmRSS")
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to what is resident now
        self.side.step(self.case, draw=0)
        peak = _resident("VmHWM")
        return Memory(peak - before, peak)

    def step(self, draw: int) -> Step:
        self.optimizer.zero_grad(set_to_none=True)
        gc.collect()
        wall, cpu = time.perf_counter(), time.process_time()
        outcome = self.side.step(self.case, draw)
        return Step(time.process_time() - cpu, time.perf_counter() - wall, outcome)


def _return_freed_memory() -> None:
    """Gives what earlier steps freed back to the system, or the peak would hide behind it."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)


def _resident(key: str) -> int:
    """Bytes of resident memory, now (VmRSS) or at most since the last reset (VmHWM)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status names no {key}; this benchmark measures memory on Linux")


def main() -> None:
    torch.set_num_threads(1)
    # Libraries may print; the answers keep a channel of their own.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    build: Callable[[Shape], Side] = importlib.import_module(f"scripts.side_by_side.{sys.argv[1]}").build
    measured: Measured | None = None
    for line in sys.stdin:
        order = json.loads(line)
        match order["do"], measured:
            case "build", None:
                shape = Shape(**order["shape"])
                measured = Measured(shape, build(shape))
                trained = {name: p.numel() for name, p in measured.side.trained().items()}
                answer: Any = {"trained": trained, "versions": measured.side.versions()}
            case "load", Measured():
                answer = asdict(measured.load(order["tokens"]))
            case "step", Measured():
                answer = asdict(measured.step(order["draw"]))
            case "floor", Measured():
                answer = measured.side.floor(measured.case, order["draw"])
            case _:
                raise ValueError(f"{order}: expected build once, then load, step or floor")
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
