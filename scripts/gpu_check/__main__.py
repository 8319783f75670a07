"""The command: parts one after the other, a table, a JSON file. See the package's docstring."""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

import scripts.gpu_check as package
from peagle_train.files import write_json
from scripts.gpu_check.backends import NAMES, backend, kernels
from scripts.gpu_check.heads import heads, plans
from scripts.gpu_check.lines import Check, Line, Settings, run
from scripts.gpu_check.others import processes, vllm

PARTS: dict[str, Callable[[Settings], Iterator[Check]]] = {
    "kernels": kernels,
    **{f"backend:{name}": partial(backend, name=name) for name in NAMES},
    **{f"heads:{name}": partial(heads, backend=name) for name in NAMES},
    "processes": processes,
    "vllm": vllm,
}
STYLES = {"ok": "green", "failure": "bold red", "skipped": "yellow"}


def main() -> int:
    options = _options()
    console = Console(width=max(140, Console().width))  # the table keeps its width where it is piped
    if options.plan:
        console.print(*plans(), sep="\n\n")
        return 0
    settings = Settings(options.device, options.tiny)
    if options.part is not None:  # a process of its own: lines to whoever started it
        for line in run(options.part, PARTS[options.part](settings)):
            print(json.dumps(line.to_dict()), flush=True)
        return 0
    if settings.device == "cuda" and not torch.cuda.is_available():
        print(
            f"gpu-check: torch {torch.__version__} sees no CUDA device here; expected an NVIDIA GPU and "
            "a CUDA build of torch (`make install TORCH=cuda`). Without one: python -m scripts.gpu_check "
            "--device cpu --tiny, which checks what needs no GPU.",
            file=sys.stderr,
        )
        return 2
    lines: list[Line] = []
    names = options.only or list(PARTS)
    with console.status("") as status:
        for number, name in enumerate(names, 1):
            for line in _part(name, settings):
                lines.append(line)
                failures = sum(line.outcome == "failure" for line in lines)
                status.update(
                    f"part {number} of {len(names)}, {name}: {len(lines)} checks so far, {failures} failures"
                )
            mine = Counter(line.outcome for line in lines if line.part == name)
            console.print(f"{name}: {_count(mine)}", highlight=False)
    console.print(_table(lines))
    outcomes = Counter(line.outcome for line in lines)
    result = {
        "machine": _machine(settings),
        "outcomes": dict(outcomes),
        "lines": [line.to_dict() for line in lines],
    }
    write_json(options.output, result)
    console.print(f"{_count(outcomes)}; written: {options.output}", highlight=False)
    return 1 if outcomes["failure"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m scripts.gpu_check",
        description=package.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda", help="cpu: a rehearsal")
    parser.add_argument("--tiny", action="store_true", help="small sizes, all in one process")
    parser.add_argument("--only", nargs="+", choices=list(PARTS), metavar="PART", help=", ".join(PARTS))
    parser.add_argument("--plan", action="store_true", help="print the heads' memory plans and end")
    parser.add_argument("--output", type=Path, default=Path("runs/gpu_check.json"), help="where the lines go")
    parser.add_argument("--part", choices=list(PARTS), help=argparse.SUPPRESS)
    return parser.parse_args()


def _part(name: str, settings: Settings) -> Iterator[Line]:
    """The lines of one part. What kills its process is a failure of the part."""
    if settings.tiny:
        yield from run(name, PARTS[name](settings))
        return
    command = [sys.executable, "-m", "scripts.gpu_check", "--part", name, "--device", settings.device]
    start = time.monotonic()
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=dict(os.environ)) as process:
        assert process.stdout is not None
        for text in process.stdout:
            if text.startswith("{"):  # libraries print too
                yield Line(**json.loads(text))
    if process.returncode != 0:
        ended = f"its process ended with status {process.returncode}; what it wrote is above"
        yield Line(name, "the part as a whole", "failure", ended, round(time.monotonic() - start, 2))


def _table(lines: list[Line]) -> Table:
    table = Table(title="gpu-check", title_justify="left")
    for title in ("part", "check", "outcome", "detail"):
        table.add_column(title, overflow="fold")
    table.add_column("s", justify="right")
    for line in lines:
        style = STYLES[line.outcome]
        outcome = f"[{style}]{line.outcome}[/{style}]"
        table.add_row(line.part, escape(line.name), outcome, escape(line.detail), f"{line.seconds:.1f}")
    return table


def _count(outcomes: Counter[Any]) -> str:
    return ", ".join(f"{outcomes[name]} {name}" for name in STYLES)


def _machine(settings: Settings) -> dict[str, Any]:
    devices = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return {
        "device": settings.device,
        "tiny": settings.tiny,
        "gpus": devices,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "python": platform.python_version(),
    }


if __name__ == "__main__":
    sys.exit(main())
