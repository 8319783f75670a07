"""One verb a stage, and `run` for all of them."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from peagle_train.cli.app import (
    Overrides,
    RecipeArgument,
    app,
    do_stage,
    open_run,
    teach,
    tell_next,
)


@app.command(
    short_help="let the target answer the prompts",
    help=teach(
        "Let the target answer the prompts; keep its tokens and which of them it generated.",
        reads="target, data (and head.aux_layers, states: the same pass can keep the states)",
        writes="OUTPUT/NAME/answers",
        example="peagle prepare smollm2 data.train.count=64 --show 2",
        then="peagle extract RECIPE",
    ),
)
def prepare(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    show: Annotated[
        int | None, typer.Option("--show", min=1, metavar="N", help="print N rows, supervised tokens marked")
    ] = None,
) -> None:
    from peagle_train.pipeline import resolve

    def rows(run: Any, console: Console) -> None:
        resolve("data_prep.show:show")(run, show, console)

    do_stage("prepare", recipe, overrides, rows if show else None)


@app.command(
    short_help="store the target's hidden states",
    help=teach(
        "Store the target's hidden states on every answered row.",
        reads="OUTPUT/NAME/answers; head.aux_layers, states",
        writes="OUTPUT/NAME/states",
        example="peagle extract smollm2",
        then="peagle train RECIPE",
    ),
)
def extract(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="read all that is stored; make damaged batches anew"),
    ] = False,
) -> None:
    from peagle_train.pipeline import resolve

    do_stage("extract", recipe, overrides, before=resolve("data_prep.repair:repair") if repair else None)


@app.command(
    short_help="train the head",
    help=teach(
        "Train the head; keep the checkpoint with the best held-out acceptance.",
        reads="OUTPUT/NAME/states; head, train, seed",
        writes="OUTPUT/NAME/training (best/, checkpoints, log)",
        example="peagle train smollm2 train.steps=800\n"
        "          on several processes: accelerate launch -m peagle_train.training recipes/smollm2.yaml",
        then="peagle export RECIPE",
    ),
)
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    anew: Annotated[
        bool, typer.Option("--anew", help="begin at step 0; what is in training/ is kept under another name")
    ] = False,
) -> None:
    do_stage("train", recipe, overrides, anew=anew)


@app.command(
    short_help="write the head as vLLM loads it",
    help=teach(
        "Write the best checkpoint as a directory that vLLM loads, proven complete before it appears.",
        reads="OUTPUT/NAME/training/best; export",
        writes="OUTPUT/NAME/head",
        example="peagle export smollm2 --format speculators\n"
        "          peagle export smollm2 --format speculators --out heads/smollm2   (beside the run's own)",
        then="peagle evaluate RECIPE",
    ),
)
def export(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    format: Annotated[
        str | None, typer.Option("--format", help="plain or speculators; the same as export.format=...")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", metavar="DIR", help="write it there too, and leave OUTPUT/NAME/head as it is"),
    ] = None,
) -> None:
    chosen = [*(overrides or []), *([f"export.format={format}"] if format is not None else [])]
    if out is None:
        do_stage("export", recipe, chosen)
        return
    from peagle_train.pipeline import export_copy
    from peagle_train.recipe import load_recipe

    wanted = load_recipe(recipe, chosen).export.format  # refuses a faulty --format before any work

    def copy(run: Any, console: Console) -> str:
        return export_copy(run, out, wanted, console)

    do_stage("export", recipe, overrides, copy)


@app.command(
    short_help="measure acceptance on held-out prompts",
    help=teach(
        "Measure acceptance on the held-out sets, offline and through the real speculative loop.",
        reads="OUTPUT/NAME/head, OUTPUT/NAME/states; evaluate",
        writes="OUTPUT/NAME/evaluation, OUTPUT/NAME/summary.json",
        example="peagle evaluate smollm2 evaluate.k=4\n"
        "          peagle evaluate smollm2 --head heads/other   (any head; the run keeps its own results)",
        then="peagle push OUTPUT/NAME/head s3://BUCKET/PREFIX",
    ),
)
def evaluate(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    head: Annotated[
        Path | None,
        typer.Option("--head", metavar="DIR", help="measure this head; the run's own results stay"),
    ] = None,
) -> None:
    from peagle_train.pipeline import evaluate_other, finish, next_command, run_stage

    console = Console()
    if head is not None:
        with open_run(recipe, overrides) as run:
            evaluate_other(run, head, console)
        tell_next(shlex.join(["peagle", "push", str(head), "s3://BUCKET/PREFIX"]), console)
        return
    with open_run(recipe, overrides) as run:
        result = run_stage(run, "evaluate", console)
        finish(run, {"evaluate": result}, console)
        tell_next(result.next_command or next_command(run, "evaluate"), console)


@app.command(
    short_help="run every stage, then report",
    help=teach(
        "Run every stage, then print acceptance, seconds, and the command that serves the head.",
        reads="the whole recipe",
        writes="OUTPUT/NAME with one folder a stage, and summary.json",
        example="peagle run smollm2 name=trial train.steps=100",
        then="the printed serving command, or peagle push OUTPUT/NAME/head s3://BUCKET/PREFIX",
    ),
)
def run(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    twin: Annotated[
        bool,
        typer.Option("--twin", help="a rehearsal in minutes: a random twin of the target, all else small"),
    ] = False,
) -> None:
    console = Console()
    if twin:
        from peagle_train.twin.rehearse import rehearse

        recipe, overrides = str(rehearse(recipe, overrides or (), console)), None
    from peagle_train.pipeline import next_command, run_all

    with open_run(recipe, overrides) as opened:
        run_all(opened, console)
        tell_next(next_command(opened, "evaluate"), console)
