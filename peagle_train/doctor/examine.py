"""The checks in their order. One that fails keeps only those from running that need what it looks for."""

from __future__ import annotations

import logging
import tempfile
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console
from rich.text import Text

from peagle_train.doctor.patient import Level, Line, Patient, failure
from peagle_train.errors import PeagleError
from peagle_train.pipeline import resolve
from peagle_train.recipe import read_recipe


@dataclass(frozen=True)
class Check:
    """A row of the table.

    Attributes:
        name: as it is printed.
        function: `module:function`, called with the patient; yields lines.
        needs: checks without whose success it cannot run.
        weights: whether it needs the target's.
    """

    name: str
    function: str
    needs: tuple[str, ...] = ()
    weights: bool = False


_HERE, _DATA = "peagle_train.doctor", "data_prep.examine"
CHECKS = (
    Check("environment", f"{_HERE}.environment:environment"),
    Check("disk and memory", f"{_HERE}.environment:room"),
    Check("packages", f"{_HERE}.environment:packages"),
    Check("target config", f"{_HERE}.target:config"),
    Check("target files", f"{_HERE}.target:files", ("target config",)),
    Check("serving", f"{_HERE}.head:serving", ("target config",)),
    Check("prompts", f"{_DATA}:prompts", ("target files",)),
    Check("control tokens", f"{_DATA}:control_tokens", ("prompts",)),
    Check("mask token", f"{_HERE}.head:mask_token", ("target files",)),
    Check("target loads", f"{_HERE}.target:load", ("target files",), weights=True),
    Check("target", f"{_HERE}.target:itself", ("target loads",), weights=True),
    Check("RoPE", f"{_HERE}.target:rope", ("target loads",), weights=True),
    Check("answers", f"{_DATA}:answers", ("target loads", "prompts"), weights=True),
    Check(
        "mask token in answers", f"{_HERE}.head:mask_token_unused", ("mask token", "answers"), weights=True
    ),
    Check("training steps", f"{_HERE}.training:steps", ("mask token", "answers"), weights=True),
    Check("vocabulary", f"{_HERE}.head:vocabulary", ("training steps",), weights=True),
    Check("weights move", f"{_HERE}.training:moved", ("training steps",), weights=True),
    Check("gradients", f"{_HERE}.training:gradients", ("training steps",), weights=True),
    Check("export", f"{_HERE}.delivery:export", ("training steps",), weights=True),
    Check("exported RoPE", f"{_HERE}.delivery:rope", ("export",), weights=True),
    Check("load", f"{_HERE}.delivery:load", ("export",), weights=True),
)
# What a check may meet that is no fault of ours to foresee: it is told, and the next check runs.
_MET = (OSError, ValueError, RuntimeError, LookupError, TypeError, ImportError, AttributeError)
_STYLES: dict[Level, str] = {"ok": "green", "warning": "yellow", "failure": "bold red", "not run": "dim"}


def examine(
    recipe: str, overrides: Sequence[str], console: Console, *, weights: bool = True
) -> list[tuple[str, Line]]:
    """Runs every check on a recipe and prints a line for each finding; returns them by check.

    weights: False runs what needs none.

    Raises RecipeError if the recipe itself is faulty: then there is nothing to examine.
    """
    loaded = read_recipe(recipe, overrides)
    found: list[tuple[str, Line]] = []
    passed: dict[str, bool] = {}
    with tempfile.TemporaryDirectory(prefix="peagle-doctor-") as room, _quiet():
        patient = Patient(loaded, Path(room), weights, console.is_terminal)
        for check in CHECKS:
            lines = []
            for line in _lines(check, patient, passed):
                _print(check.name, line, console)
                lines.append(line)
            passed[check.name] = all(line.level in ("ok", "warning") for line in lines)
            found += [(check.name, line) for line in lines]
    for text in patient.shown:
        console.print(text, soft_wrap=True)
    levels = [line.level for _, line in found]
    counts = ", ".join(f"{levels.count(level)} {level}" for level in _STYLES if level in levels)
    console.print(f"{loaded.places.source}: {counts}", markup=False, highlight=False)
    return found


def _lines(check: Check, patient: Patient, passed: dict[str, bool]) -> Iterator[Line]:
    missing = [name for name in check.needs if not passed[name]]
    if check.weights and not patient.weights:
        yield Line("not run", "needs the target's weights (--no-weights)")
    elif missing:
        yield Line("not run", f"needs what did not pass: {', '.join(missing)}")
    else:
        function: Callable[[Patient], Iterator[Line]] = resolve(check.function)
        try:
            yield from function(patient)
        except PeagleError as error:
            yield failure(str(error), "")
        except _MET as error:
            text = f"{type(error).__name__}: {error}"
            yield failure(text, "if the message does not tell, report it with the recipe")


def _print(name: str, line: Line, console: Console) -> None:
    text = Text(f"{line.level:<8} ", style=_STYLES[line.level]).append(f"{name}: ", style="bold")
    text.append(line.text, style="default")
    if line.cure:
        text.append(f"; {line.cure}", style="default")
    console.print(text, soft_wrap=True)


class _quiet:
    """Libraries keep their warnings to themselves: what matters is a finding."""

    def __enter__(self) -> None:
        self._caught = warnings.catch_warnings()
        self._caught.__enter__()
        warnings.simplefilter("ignore")
        self._logger = logging.getLogger("transformers")
        self._level = self._logger.level
        self._logger.setLevel(logging.ERROR)

    def __exit__(self, *error: object) -> None:
        self._logger.setLevel(self._level)
        self._caught.__exit__(None, None, None)
