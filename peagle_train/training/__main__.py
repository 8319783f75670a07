"""The training stage under any launcher.

accelerate launch -m peagle_train.training RECIPE [key=value ...]
"""

from __future__ import annotations

import os
import sys

from rich.console import Console

from peagle_train.errors import PeagleError
from peagle_train.run import Run
from peagle_train.training.stage import train


def main(arguments: list[str]) -> int:
    """Trains; every process of the launcher calls this. Returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: accelerate launch -m peagle_train.training RECIPE [key=value ...]")
        print("RECIPE is a YAML file; its states must have been extracted: peagle extract RECIPE")
        return 0 if arguments else 2
    main_process = os.environ.get("RANK", "0") == "0"
    console = Console(quiet=not main_process)
    try:
        with Run.open(arguments[0], arguments[1:], write=main_process) as run:
            result = train(run, console)
    except PeagleError as error:
        print(error, file=sys.stderr)
        return 1
    console.print(result.message, markup=False)
    if result.next_command:
        console.print(f"next: {result.next_command}", markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
