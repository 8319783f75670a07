"""A run: a valid recipe, its target's facts, and the folder everything is written to.

OUTPUT/NAME/
  recipe.resolved.yaml   the recipe with every default and override written out
  run.json               versions, and every command that worked here
  answers/ states/ training/ head/ evaluation/    one folder a stage, each with its stage.json
  summary.json           the results, for machines
"""

from __future__ import annotations

import datetime
import shlex
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from peagle_train.files import fingerprint, read_json, write_json, write_text
from peagle_train.lock import FolderLock
from peagle_train.recipe import Recipe, check_against_target, read_recipe
from peagle_train.recipe.yaml_text import dump, parse
from peagle_train.versions import versions

if TYPE_CHECKING:
    from peagle_train.target.source import TargetFacts

FOLDERS = {
    "prepare": "answers",
    "extract": "states",
    "train": "training",
    "export": "head",
    "evaluate": "evaluation",
}
"""Folder of each stage below the run's folder, in the order the data flows."""


@dataclass(frozen=True)
class Run:
    """Everything a stage is given. Use it in a `with` block, or call `close()`, to free the folder.

    Attributes:
        recipe: valid, and checked against the target.
        source: path of the recipe.
        overrides: `a.b=c` as given.
        command: the command line, for the record.
        facts: sizes of the target.
    """

    recipe: Recipe
    source: str
    overrides: tuple[str, ...]
    command: tuple[str, ...]
    facts: TargetFacts
    lock: FolderLock | None = field(default=None, repr=False, compare=False)

    @classmethod
    def open(
        cls,
        recipe_path: Path | str,
        overrides: Sequence[str] = (),
        command: Sequence[str] | None = None,
        *,
        write: bool = True,
    ) -> Run:
        """Loads and checks a recipe, and makes its folder this process's own.

        Args:
            recipe_path: a YAML file, or NAME of recipes/NAME.yaml.
            overrides: `a.b=c`, the value in YAML.
            command: left out: `sys.argv`.
            write: False neither writes nor locks anything: for the other ranks of a distributed job,
                of which only the main process may write.

        Raises:
            RecipeError: with every fault of the recipe.
            PeagleError: the target is not to be found, or another process works in the folder.
        """
        from peagle_train.target.source import describe  # here, because it may need heavy packages

        loaded = read_recipe(recipe_path, overrides)
        facts = describe(loaded.recipe.target)
        check_against_target(loaded.recipe, facts, loaded.places.source, loaded.places)
        run = cls(
            recipe=loaded.recipe,
            source=loaded.places.source,
            overrides=tuple(overrides),
            command=tuple(sys.argv if command is None else command),
            facts=facts,
            lock=FolderLock(run_directory(loaded.recipe)) if write else None,
        )
        if write:
            run._record()
        return run

    def close(self) -> None:
        """Lets other processes work in the folder."""
        if self.lock is not None:
            self.lock.release()

    @contextmanager
    def lent(self) -> Iterator[None]:
        """The folder belongs to another process for the block, which works there in this one's name.

        Raises PeagleError afterwards if a third one took it meanwhile.
        """
        if self.lock is None:
            yield
            return
        self.lock.release()
        try:
            yield
        finally:
            self.lock.take()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def directory(self) -> Path:
        """OUTPUT/NAME."""
        return run_directory(self.recipe)

    def stage_dir(self, stage: str) -> Path:
        """The folder a stage writes."""
        return self.directory / FOLDERS[stage]

    @property
    def answers_dir(self) -> Path:
        return self.stage_dir("prepare")

    @property
    def states_dir(self) -> Path:
        return self.stage_dir("extract")

    @property
    def training_dir(self) -> Path:
        return self.stage_dir("train")

    @property
    def head_dir(self) -> Path:
        return self.stage_dir("export")

    @property
    def evaluation_dir(self) -> Path:
        return self.stage_dir("evaluate")

    @property
    def summary_path(self) -> Path:
        return self.directory / "summary.json"

    def command_for(self, verb: str) -> str:
        """The command line that runs `verb` on this recipe with the same overrides."""
        return shlex.join(["peagle", verb, self.source, *self.overrides])

    def _record(self) -> None:
        """Keeps the resolved recipe, the versions and the command line with the run."""
        resolved = self.directory / "recipe.resolved.yaml"
        values = self.recipe.model_dump(mode="json")
        if resolved.is_file():
            before = parse(resolved.read_text(encoding="utf-8")).value
            if before != values:
                resolved.rename(resolved.with_name(f"recipe.resolved.old-{fingerprint(before)[:8]}.yaml"))
        write_text(resolved, dump(values))
        path = self.directory / "run.json"
        commands: list[dict[str, Any]] = read_json(path)["commands"] if path.is_file() else []
        commands.append(
            {
                "started": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
                "command": shlex.join(self.command),
                "recipe": self.source,
                "overrides": list(self.overrides),
                "resolved_recipe": fingerprint(values),
            }
        )
        write_json(path, {"versions": versions(), "commands": commands})


def run_directory(recipe: Recipe) -> Path:
    """The folder of a recipe's run, OUTPUT/NAME."""
    return Path(recipe.output) / recipe.name
