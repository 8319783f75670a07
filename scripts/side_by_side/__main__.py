"""The command: two processes in turns, a table, a JSON file. See the package's docstring."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import scripts.side_by_side as package
from peagle_train.errors import PeagleError
from peagle_train.files import write_json
from scripts.learning.process import SURROUNDINGS, require_peer
from scripts.side_by_side.case import Shape

SIZES = (512, 1024, 2048, 4096)
AT_LEAST = {1024: 1.6, 2048: 2.6, 4096: 4.0}
"""CPU-seconds of the peer over ours that are asked for, by document length."""
FLOOR_AT_MOST = 1.25
"""Our CPU-seconds over the kernel floor, from 1,024 tokens on."""
RATES = {
    "blas_rate": ("linear", "linear by torch.mm, per CPU-s"),
    "matmul_rate": ("linear", "linear by ours, per CPU-s"),
    "attention_rate": ("attention", "attention, per CPU-s"),
}
"""What the floor divides by, as `ours.Ours.floor` names it: kind of operations, row of the table."""
MEMORY_AT_MOST = {2048: 0.25, 4096: 0.25}
"""Our memory above static state over the peer's."""


class SideProcess:
    """A worker on one thread; `ask` sends one order and waits for its answer."""

    def __init__(self, python: str, name: str):
        self.name = name
        self.process = subprocess.Popen(
            [python, "-m", "scripts.side_by_side.worker", name],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **SURROUNDINGS},
        )

    def ask(self, do: str, **order: Any) -> dict[str, Any]:
        assert self.process.stdin is not None and self.process.stdout is not None
        with suppress(BrokenPipeError):  # then it has ended, and there is no answer either
            self.process.stdin.write(json.dumps({"do": do, **order}) + "\n")
            self.process.stdin.flush()
        answer = self.process.stdout.readline()
        if not answer:
            raise PeagleError(
                f"{self.name}: ended with status {self.process.wait()} at {do} {order}; see above"
            )
        return dict(json.loads(answer))

    def close(self) -> None:
        assert self.process.stdin is not None
        with suppress(BrokenPipeError):
            self.process.stdin.close()
        self.process.wait()


def main() -> None:
    options = _options()
    frozen = options.freeze
    shape = Shape(train_embeddings="embeddings" not in frozen, train_output="output" not in frozen)
    console = Console(width=max(100, Console().width))  # the tables are that wide
    if options.sizes:
        try:
            require_peer(options.peer_python, "side-by-side")
        except PeagleError as error:
            sys.exit(f"error: {error}")
    ours = SideProcess(sys.executable, "ours")
    peer = SideProcess(options.peer_python, "peer") if options.sizes else None
    sides = [side for side in (ours, peer) if side is not None]
    try:
        built = {side.name: side.ask("build", shape=shape.to_dict()) for side in sides}
        _print_sides(built, console)
        result: dict[str, Any] = {
            "shape": shape.to_dict(),
            "machine": _machine(),
            "sides": {name: {**b, "trained": sum(b["trained"].values())} for name, b in built.items()},
            "sizes": {},
        }
        for tokens in [*options.sizes, *options.ours_only]:
            sizes = result["sizes"]
            sizes[str(tokens)] = _measure(
                [ours, peer] if peer and tokens in options.sizes else [ours], tokens, options.repeats, console
            )
            write_json(options.output, result)
    except PeagleError as error:
        sys.exit(f"error: {error}")
    finally:
        for side in sides:
            side.close()
    _print_table(result["sizes"], console)
    _print_counts(result["sizes"], console)
    console.print(f"written: {options.output}", highlight=False)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.side_by_side",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sizes", type=_sizes, default=list(SIZES), help="document lengths for both sides")
    parser.add_argument("--ours-only", type=_sizes, default=[], help="document lengths for ours alone")
    parser.add_argument("--repeats", type=int, default=3, help="timed steps of each side; the median counts")
    parser.add_argument(
        "--freeze",
        nargs="*",
        choices=["embeddings", "output"],
        default=[],
        help="tables that neither side trains",
    )
    parser.add_argument(
        "--peer-python", default=".venv-peer/bin/python", help="python with speculators 0.9.0"
    )
    parser.add_argument(
        "--output", type=Path, default=Path("runs/side_by_side.json"), help="where the figures go"
    )
    return parser.parse_args()


def _sizes(text: str) -> list[int]:
    parts = [part.strip() for part in text.split(",") if part.strip()]
    if not all(part.isdecimal() and int(part) > 1 for part in parts):
        raise argparse.ArgumentTypeError(
            f"{text!r}; expected numbers of tokens with commas between: 512,1024"
        )
    return [int(part) for part in parts]


def _measure(sides: list[SideProcess], tokens: int, repeats: int, console: Console) -> dict[str, Any]:
    """One document length: memory first, then timed steps in turns, the machine's rates among them."""
    found: dict[str, Any] = {
        side.name: {"memory": side.ask("load", tokens=tokens), "steps": []} for side in sides
    }
    floors = []
    for draw in range(1, repeats + 1):
        for side in sides:
            step = side.ask("step", draw=draw)
            found[side.name]["steps"].append(step)
            seconds = f"{step['cpu_seconds']:8.2f} CPU-seconds, {step['wall_seconds']:8.2f} s"
            console.print(f"S = {tokens:,} {side.name} {draw}/{repeats}: {seconds}", highlight=False)
        floors.append(sides[0].ask("floor", draw=draw))
    for figures in found.values():
        figures["cpu_seconds"] = statistics.median(step["cpu_seconds"] for step in figures["steps"])
        figures["tokens_per_cpu_second"] = tokens / figures["cpu_seconds"]
    found["floor"] = _floor(floors)
    return found


def _floor(floors: list[dict[str, Any]]) -> dict[str, Any]:
    """Median rates, and the counts of the last draw: draws differ in which chains they keep, not how many."""
    last = floors[-1]
    rates = {rate: statistics.median(f[rate] for f in floors) for rate in RATES}
    linear, attention = sum(last["linear"].values()), sum(last["attention"].values())
    seconds = linear / max(rates["matmul_rate"], rates["blas_rate"]) + attention / rates["attention_rate"]
    return {"linear": last["linear"], "attention": last["attention"], **rates, "cpu_seconds": seconds}


def _print_sides(built: dict[str, Any], console: Console) -> None:
    for name, side in built.items():
        versions = ", ".join(f"{package} {version}" for package, version in side["versions"].items())
        console.print(
            f"{name}: {sum(side['trained'].values()):,} trained parameters; {versions}", highlight=False
        )
    counts = {sum(side["trained"].values()) for side in built.values()}
    torches = {side["versions"]["torch"] for side in built.values()}
    if len(counts) > 1 or len(torches) > 1:
        raise PeagleError(
            "the sides differ in what they train or in torch, so their times cannot be compared"
        )


def _print_table(sizes: dict[str, Any], console: Console) -> None:
    table = Table(title="A step (forward and backward, no optimizer), one thread, float32")
    for column in (
        "S",
        "side",
        "rows",
        "with loss",
        "CPU-s",
        "tokens\n/ CPU-s",
        "above\nstatic",
        "whole\nprocess",
    ):
        table.add_column(column, justify="left" if column == "side" else "right")
    for size, found in sizes.items():
        for name in ("ours", "peer"):
            if name in found:
                side, outcome = found[name], found[name]["steps"][-1]["outcome"]
                table.add_row(
                    f"{int(size):,}",
                    name,
                    f"{outcome['rows']:,}",
                    f"{outcome['elements']:,}",
                    f"{side['cpu_seconds']:.2f}",
                    f"{side['tokens_per_cpu_second']:.0f}",
                    _gb(side["memory"]["above_static"]),
                    _gb(side["memory"]["process"]),
                )
    console.print(table)
    table = Table(title="Ratios")
    pairs = ("CPU-s\npeer / ours", "memory\nours / peer", "CPU-s\nours / floor")
    for column in ("S", *(title for pair in pairs for title in (pair, "asked"))):
        table.add_column(column, justify="right")
    for size, found in sizes.items():
        tokens, ours, peer = int(size), found["ours"], found.get("peer")
        table.add_row(
            f"{tokens:,}",
            f"{peer['cpu_seconds'] / ours['cpu_seconds']:.2f}" if peer else "",
            f"≥ {AT_LEAST[tokens]}" if peer and tokens in AT_LEAST else "",
            f"{ours['memory']['above_static'] / peer['memory']['above_static']:.2f}" if peer else "",
            f"≤ {MEMORY_AT_MOST[tokens]}" if peer and tokens in MEMORY_AT_MOST else "",
            f"{ours['cpu_seconds'] / found['floor']['cpu_seconds']:.2f}",
            f"≤ {FLOOR_AT_MOST}" if tokens >= 1024 else "",
        )
    console.print(table)
    console.print(
        "with loss: ours are the slots and chains that a server would use: the anchor's token and the label "
        "both of the answer. The peer's are all rows at positions of the answer, its first token included.\n"
        "above static: peak within the step less program, document, weights, gradients and AdamW's moments."
    )


def _print_counts(sizes: dict[str, Any], console: Console) -> None:
    table = Table(title="Kernel floor: 1e9 operations that the exact result needs (counted in floor.py)")
    table.add_column("term")
    for size in sizes:
        table.add_column(f"S = {int(size):,}", justify="right")
    floors = [found["floor"] for found in sizes.values()]
    for kind in ("linear", "attention"):
        for term in floors[0][kind]:
            table.add_row(f"{kind}: {term}", *(f"{floor[kind][term] / 1e9:,.1f}" for floor in floors))
        for rate, (of, title) in RATES.items():
            if of == kind:
                table.add_row(title, *(f"{floor[rate] / 1e9:,.1f}" for floor in floors))
        table.add_section()
    table.add_row("floor, CPU-s", *(f"{floor['cpu_seconds']:.2f}" for floor in floors))
    console.print(table)


def _gb(size: int) -> str:
    return f"{size / 1e9:.2f} GB"


def _machine() -> dict[str, Any]:
    """What the figures were measured on."""
    cpu = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return {
        "cpu": cpu[0].partition(":")[2].strip() if cpu else platform.processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "system": platform.platform(),
        "python": platform.python_version(),
        "load_at_start": os.getloadavg(),
        "threads": 1,
        "torch_kernels": torch.backends.cpu.get_cpu_capability(),
    }


if __name__ == "__main__":
    main()
