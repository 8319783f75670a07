"""What all trainings of an ablation share."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from peagle_train import PeagleError, Run
from peagle_train.stages import require
from peagle_train.store.states import StateStore
from peagle_train.target.source import obtain
from scripts.ablate.grid import BASE, COMBINATION, Source, Variant, folder_name
from scripts.ablate.job import Job, code_version, fingerprint_of

LEAST_PROMPTS = 100
"""Below this many prompts an interval is too wide to choose by."""


@dataclass(frozen=True)
class Bench:
    """What all jobs share.

    store, states: the stored states, and their fingerprint. target: its folder. output: where jobs go.
    choose, final: the held-out set that chooses, and the one that is opened at the end. code: its version.
    """

    source: Source
    store: StateStore
    states: str
    target: Path
    output: Path
    seeds: Sequence[int]
    seconds: float
    choose: str
    final: str
    code: str

    @classmethod
    def of(cls, run: Run, options: Namespace, console: Console) -> Bench:
        states = require(run, "extract")
        store = StateStore(run.states_dir, expected=states)
        sets = list(run.recipe.data.heldout)
        choose, final = options.choose_on or sets[0], options.final_on or sets[-1]
        unknown = [name for name in (choose, final) if name not in sets]
        if unknown or choose == final:
            raise PeagleError(
                f"--choose-on {choose}, --final-on {final}: expected two of {', '.join(sets)}, the sets "
                "of data.heldout"
            )
        prompts = len(store.info(choose))
        if prompts < LEAST_PROMPTS:
            raise PeagleError(
                f"data.heldout.{choose}: found {prompts} prompts; expected at least {LEAST_PROMPTS} to "
                "choose by; raise its count"
            )
        return cls(
            source=Source(options.recipe, tuple(options.overrides), run.facts),
            store=store,
            states=states,
            target=obtain(run.recipe.target, console),
            output=options.output,
            seeds=options.seeds,
            seconds=options.seconds,
            choose=choose,
            final=final,
            code=code_version(),
        )

    def jobs(self, variant: Variant) -> list[Job]:
        """The trainings of a variant, one a seed. Heads of the base and the combination are kept."""
        recipe = self.source.recipe(variant.overrides)
        jobs = []
        for seed in self.seeds:
            name = fingerprint_of(
                recipe,
                states=self.states,
                seed=seed,
                seconds=self.seconds,
                measure=self.choose,
                code=self.code,
            )
            folder = f"{folder_name(variant.name)}-seed{seed}-{name}"
            jobs.append(
                Job(
                    name=variant.name,
                    directory=str(self.output / "jobs" / folder),
                    recipe=self.source.path,
                    overrides=[*self.source.overrides, *variant.overrides],
                    states=str(self.store.directory),
                    target=str(self.target),
                    seed=seed,
                    seconds=self.seconds,
                    measure=self.choose,
                    keep=variant.name in (BASE, COMBINATION),
                    fingerprint=name,
                )
            )
        return jobs
