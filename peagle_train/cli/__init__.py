"""`peagle`: the command line.

    app.py          the command, and what its verbs share
    stages.py       prepare, extract, train, export, evaluate, run
    beforehand.py   plan, init, doctor, twin
    heads.py        push, import, check
    recipes.py      sources, recipe

Thin on purpose: each verb opens the run, calls one function, prints. What needs torch is imported when
its verb runs, so that `--help` answers at once.
"""

from peagle_train.cli import stages, beforehand, heads, recipes  # noqa: F401, I001 - `--help` lists in this order
from peagle_train.cli.app import app

__all__ = ["app", "main"]


def main() -> None:
    """Entry point of the `peagle` command."""
    app()
