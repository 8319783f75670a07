"""P-EAGLE Train: parallel-drafting heads for speculative decoding in vLLM.

    from rich.console import Console
    from peagle_train import Run, run_all

    with Run.open("recipes/smollm2.yaml", ["train.steps=200"]) as run:
        summary = run_all(run, Console())

Importing the package loads nothing heavy; each name below loads its module when it is first used.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from peagle_train.errors import PeagleError, RecipeError
    from peagle_train.pipeline import run_all, run_stage
    from peagle_train.recipe import Recipe, load_recipe
    from peagle_train.run import Run

# Before torch starts its threads. By default they spin while they wait for each other, and on a CPU that is
# shared they spin for a neighbour that waits for the core: a training step of 0.2 s took more than 1.7 s
# beside two busy processes. With short spins it takes 0.4 s there, and 4 % more on an idle CPU.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

_HOMES = {
    "PeagleError": "peagle_train.errors",
    "Recipe": "peagle_train.recipe",
    "RecipeError": "peagle_train.errors",
    "Run": "peagle_train.run",
    "load_recipe": "peagle_train.recipe",
    "run_all": "peagle_train.pipeline",
    "run_stage": "peagle_train.pipeline",
}

__all__ = ["PeagleError", "Recipe", "RecipeError", "Run", "load_recipe", "run_all", "run_stage"]


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("peagle-train")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
