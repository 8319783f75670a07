"""The training stage under any launcher.

accelerate launch -m peagle_train.training RECIPE [key=value ...] [--anew]
"""

from __future__ import annotations

import os
import sys

from rich.console import Console

from peagle_train.errors import PeagleError
from peagle_train.pipeline import states_of
from peagle_train.run import Run
from peagle_train.training.signals import StoppedError
from peagle_train.training.stage import train
from peagle_train.training.together import ElsewhereError

ANEW = "--anew"
"""As of `peagle train`: begin at step 0, and keep what is there under another name."""


def main(arguments: list[str]) -> int:
    """Trains; every process of the launcher calls this. Returns the exit code."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print("usage: accelerate launch -m peagle_train.training RECIPE [key=value ...] [--anew]")
        print("RECIPE is a YAML file; its states must have been extracted: peagle extract RECIPE")
        return 0 if arguments else 2
    overrides = [argument for argument in arguments[1:] if argument != ANEW]
    main_process = os.environ.get("RANK", "0") == "0"
    console = Console(quiet=not main_process)
    try:
        with Run.open(arguments[0], overrides, write=main_process) as run:
            result = train(run, console, anew=ANEW in arguments, open_states=states_of(run, "train"))
    except ElsewhereError as error:
        return error.exit_code  # the process that failed tells why
    except PeagleError as error:
        if main_process or not isinstance(error, StoppedError):
            print(error, file=sys.stderr)
        return error.exit_code
    console.print(result.message, markup=False)
    if result.next_command:
        console.print(f"Next: {result.next_command}", markup=False, highlight=False, soft_wrap=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
