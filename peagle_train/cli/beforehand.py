"""Verbs for the time before a run: what it will cost, what can be wrong, a rehearsal."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from peagle_train.cli.app import (
    Overrides,
    RecipeArgument,
    app,
    tell_next,
)
from peagle_train.errors import PeagleError


@app.command(
    short_help="say what a recipe will cost, and whether it can be",
    help="Say what a recipe will cost (head, memory, disk, tokens, hours) and whether vLLM can serve it.\n\n"
    "\b\nReads:    the recipe and its target's config; answers that are there already; no weights, no GPU\n"
    "Writes:   nothing\n"
    "Example:  peagle plan gpt-oss-20b\n"
    "          peagle plan gpt-oss-20b --launch recipes/accelerate/fsdp2.yaml --gpu-memory 141 --json\n"
    "Then:     peagle doctor RECIPE\n\n"
    "What cannot be is refused: a process that does not fit its GPU, states that do not fit the disk. Where "
    "the target's config cannot be had, sizes known of the four targets are taken, and this is said.",
)
def plan(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    rate: Annotated[
        float | None, typer.Option("--rate", help="tokens/s of training, all processes, as training prints")
    ] = None,
    answer_rate: Annotated[
        float | None, typer.Option("--answer-rate", help="tokens/s at which the target answers")
    ] = None,
    gpu_memory: Annotated[
        float | None, typer.Option("--gpu-memory", metavar="GB", help="of a GPU; left out: this one's, or 80")
    ] = None,
    launch: Annotated[
        Path | None, typer.Option("--launch", metavar="FILE", help="in place of the recipe's train.launch")
    ] = None,
    anyway: Annotated[bool, typer.Option("--anyway", help="what cannot be is told and no error")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="for machines: bytes, tokens, hours")] = False,
) -> None:
    for name, given in (("--rate", rate), ("--answer-rate", answer_rate), ("--gpu-memory", gpu_memory)):
        if given is not None and given <= 0:
            raise PeagleError(f"{name}: found {given:g}; expected a number above 0")
    from peagle_train.planning import Options, plan_recipe, print_plan, require

    found = plan_recipe(recipe, overrides or (), Options(rate, answer_rate, gpu_memory, launch))
    if as_json:
        typer.echo(json.dumps(found.to_dict(), indent=2))
    else:
        print_plan(found, Console(), refusals=anyway)
    require(found, anyway=anyway)


@app.command(
    short_help="write a recipe for a model of yours",
    help="Write a commented recipe for a target, from its config alone.\n\n"
    "\b\nReads:    the config (and the tokenizer, if it is there) of MODEL: a Hub id or a folder\n"
    "Writes:   recipes/NAME.yaml, or the file of --out; never over one that is there\n"
    "Example:  peagle init meta-llama/Llama-3.1-8B-Instruct --name llama8\n"
    "Then:     peagle plan NAME",
)
def init(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="a Hub id or a folder")],
    out: Annotated[
        Path | None, typer.Option("--out", metavar="FILE", help="left out: recipes/NAME.yaml")
    ] = None,
    name: Annotated[
        str | None, typer.Option("--name", help="of the recipe; left out: from the model's")
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="of the model on the Hub")] = None,
) -> None:
    from peagle_train.planning.init import write_recipe

    written = write_recipe(model, out=out, name=name, revision=revision)
    for line in written.told:
        typer.echo(line)
    tell_next(f"peagle plan {shlex.quote(str(written.path))}", Console())


@app.command(
    short_help="look for everything that can be wrong",
    help="Look for everything that can be wrong with a recipe here, before hours are spent on it.\n\n"
    "\b\nReads:    the recipe, its target (weights once), a handful of its prompts\n"
    "Writes:   nothing; it works in a temporary folder\n"
    "Example:  peagle doctor smollm2\n"
    "          peagle doctor gpt-oss-20b --no-weights   (on a laptop)\n"
    "Then:     peagle run RECIPE\n\n"
    "One line a finding: ok, warning or failure, with the cure. A failure keeps only those checks from "
    "running that need what failed, and makes the exit code 1.",
)
def doctor(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    no_weights: Annotated[
        bool, typer.Option("--no-weights", help="only what needs no weights of the target")
    ] = False,
) -> None:
    from peagle_train.doctor.examine import examine

    found = examine(recipe, overrides or (), Console(), weights=not no_weights)
    if any(line.level == "failure" for _, line in found):
        raise typer.Exit(1)


@app.command(
    short_help="make a random twin of the target",
    help="Make a tiny random model of the target's class, with its family's tokenizer and chat format.\n\n"
    "\b\nReads:    target, head.layers of the recipe; of the target its config at most\n"
    "Writes:   DIR, a model folder as `target.model` takes it\n"
    "Example:  peagle twin qwen3-coder --out targets/qwen3-coder-twin\n"
    "Then:     peagle run RECIPE --twin, which makes one itself and rehearses the whole recipe with it",
)
def twin(
    recipe: RecipeArgument,
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="where it is written; must not exist")],
    overrides: Overrides = None,
) -> None:
    from peagle_train.twin.rehearse import write_twin

    write_twin(recipe, overrides or (), out, Console())
