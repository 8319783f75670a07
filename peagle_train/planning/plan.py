"""The plan of a recipe: every part of it, and what cannot be."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from peagle_train.errors import PeagleError
from peagle_train.planning.advice import advice
from peagle_train.planning.disk import Disk, disk_of
from peagle_train.planning.head import HeadPlan, head_of
from peagle_train.planning.lengths import Lengths, lengths_of
from peagle_train.planning.ranks import Launch, Rank, gpu_bytes, launch_of, launches, on_gpus, rank_of
from peagle_train.planning.serving import Served, served
from peagle_train.planning.work import RATES, Work, work_of
from peagle_train.recipe import Recipe, check_against_target, read_recipe
from peagle_train.run import run_directory
from peagle_train.target.facts import TargetFacts
from peagle_train.target.known import describe_or_known, known


@dataclass(frozen=True)
class Options:
    """What a user may say beside the recipe.

    rate: tokens per second of the training, over all processes. answer_rate: of the answers.
    gpu_memory: GB of a GPU. launch: a launch file in place of the recipe's.
    """

    rate: float | None = None
    answer_rate: float | None = None
    gpu_memory: float | None = None
    launch: Path | None = None


@dataclass(frozen=True)
class Hours:
    """Hours of a stage, None where no rate is known, and where the rate comes from."""

    train: float
    train_rate: str
    answer: float | None


@dataclass(frozen=True)
class Plan:
    """What a recipe comes to.

    Attributes:
        note: how the target's sizes were had, if not from its config.
        chosen: the process of the launch that the recipe, or the user, chose.
        ranks: one process of each launch, the chosen one among them.
        answer_tokens: that the target will generate; at most where `lengths` are bounds.
        refusals: what cannot be as it stands; empty for a plan that can be carried out.
    """

    source: str
    recipe: Recipe
    facts: TargetFacts
    note: str | None
    head: HeadPlan
    lengths: Lengths
    disk: Disk
    chosen: Rank
    ranks: list[Rank]
    work: Work
    hours: Hours
    serving: list[Served]
    warnings: list[str]
    answer_tokens: int
    refusals: list[str] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For machines: bytes, tokens, hours and counts."""
        work, disk = self.work, self.disk
        return {
            "recipe": self.source,
            "target": {"model": self.facts.model, "class": self.facts.class_name, "note": self.note},
            "head": {
                "parameters": self.head.total,
                "trained": self.head.trained,
                "exported_bytes": self.head.exported,
            },
            "lengths": {
                "source": self.lengths.source,
                "rows": {name: rows.rows for name, rows in self.lengths.sets.items()},
                "mean_row_tokens": round(self.lengths.train.mean_row, 1),
                "mean_answer_tokens": round(self.lengths.train.mean_answer, 1),
                "cut_share": self.lengths.train.cut,
                "answer_tokens": self.answer_tokens,
            },
            "disk": {
                "answers_bytes": disk.answers,
                "states_bytes": disk.states,
                "states_at_most_bytes": disk.states_at_most,
                "training_bytes": disk.training,
                "needed_bytes": disk.needed,
                "free_bytes": disk.free,
                "states_url": disk.elsewhere,
                "states_mode": disk.mode,
            },
            "memory": [_memory(rank) for rank in self.ranks],
            "work": {
                "steps": work.steps,
                "steps_per_epoch": work.steps_per_epoch,
                "epochs": work.epochs,
                "tokens_per_step": round(work.tokens_per_step, 1),
                "tokens": round(work.tokens),
                "operations_per_step": work.operations_per_step,
                "processes": self.chosen.launch.processes,
                "hours": self.hours.train,
                "rate": self.hours.train_rate,
                "answer_hours": self.hours.answer,
            },
            "serving": [{"name": part.name, "good": part.good, "text": part.text} for part in self.serving],
            "warnings": self.warnings,
            "refusals": self.refusals,
        }


def plan_recipe(path: Path | str, overrides: Sequence[str] = (), options: Options | None = None) -> Plan:
    """The plan of a recipe's file; nothing is written.

    Raises RecipeError with every fault of the recipe, PeagleError for a target or launch file that is not
    there.
    """
    loaded = read_recipe(path, overrides)
    facts, note = describe_or_known(loaded.recipe.target)
    check_against_target(loaded.recipe, facts, loaded.places.source, loaded.places)
    return plan_of(loaded.recipe, facts, loaded.places.source, options or Options(), note)


def plan_of(
    recipe: Recipe, facts: TargetFacts, source: str, options: Options, note: str | None = None
) -> Plan:
    """The plan of a recipe that was checked against its target's facts."""
    about = known(recipe.target.model)
    head = head_of(recipe, facts)
    config = head.head.config
    lengths = lengths_of(recipe, about.answer_tokens if about is not None else None)
    launch = launch_of(recipe, options.launch)
    work = work_of(lengths.train, config, recipe.train, launch.processes, exact=lengths.exact)
    gpu = gpu_bytes(options.gpu_memory)

    def rank(of: Launch) -> Rank:
        return rank_of(recipe, head, facts.hidden_size, work.longest, of, gpu)

    chosen = rank(launch)
    others = [] if options.launch is not None else launches(recipe, None)
    ranks = [chosen, *(rank(other) for other in others if other != launch)]
    disk = disk_of(recipe, facts, head, lengths)
    serving = served(recipe, facts, config)
    tokens = sum(rows.total(rows.mean_answer) for rows in lengths.sets.values())
    return Plan(
        source=source,
        recipe=recipe,
        facts=facts,
        note=note,
        head=head,
        lengths=lengths,
        disk=disk,
        chosen=chosen,
        ranks=ranks,
        work=work,
        hours=_hours(work, recipe, launch, tokens, options),
        serving=serving,
        warnings=list(advice(recipe, about, lengths, work, chosen.device)),
        answer_tokens=int(tokens),
        refusals=_refusals(recipe, chosen, disk, serving),
    )


def _hours(work: Work, recipe: Recipe, launch: Launch, answers: float, options: Options) -> Hours:
    answer = None if options.answer_rate is None else answers / options.answer_rate / 3600
    device = "cuda" if on_gpus(recipe, launch) else "cpu"
    each, why = RATES[device]
    units = launch.processes if device == "cuda" else launch.processes * torch.get_num_threads()
    rate = f"{options.rate:,.0f} tokens/s, as given" if options.rate is not None else why
    hours = work.hours(tokens_per_second=options.rate, operations_per_second=each * units)
    return Hours(hours, rate, answer)


def _refusals(recipe: Recipe, chosen: Rank, disk: Disk, serving: list[Served]) -> list[str]:
    found = []
    if chosen.fault is not None:
        found.append(f"{chosen.launch.name}: {chosen.fault}")
    if disk.needed > disk.free:
        found.append(
            f"output: {os.fspath(run_directory(recipe))} needs about {disk.needed / 1e9:,.1f} GB and its "
            f"disk has {disk.free / 1e9:,.1f} GB free; set `output` to a larger disk, lower "
            "data.train.count, keep the states at a URL (states.url), under a cap (states.mode=bounded "
            "states.cap=GB), or store none (states.mode=online)"
        )
    found += [f"serving: {part.name}: {part.text}" for part in serving if not part.good]
    return found


def _memory(rank: Rank) -> dict[str, Any]:
    plan = rank.plan
    return {
        "launch": rank.launch.name,
        "kind": rank.launch.kind,
        "processes": rank.launch.processes,
        "device": rank.device,
        "budget_bytes": rank.budget,
        "peak_bytes": None if plan is None else plan.peak,
        "fault": rank.fault,
    }


def require(plan: Plan, *, anyway: bool) -> None:
    """Raises PeagleError with everything that cannot be, unless the user goes on anyway."""
    if plan.refusals and not anyway:
        lines = "\n".join(f"  {text}" for text in plan.refusals)
        raise PeagleError(
            f"{plan.source}: this cannot be done as it stands\n{lines}\n  --anyway plans on regardless"
        )
