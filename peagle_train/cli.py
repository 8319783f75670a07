"""`peagle`: one verb a stage, and `run` for all of them.

Thin on purpose: each verb opens the run, calls one function, prints. What needs torch is imported when
its verb runs, so that `--help` answers at once.
"""

from __future__ import annotations

import json
import os
import shlex
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
import typer.core
from rich.console import Console

from peagle_train.errors import PeagleError


class _Verbs(typer.core.TyperGroup):
    """Prints the faults a user can mend without a traceback, and leaves with the exit code of each."""

    def list_commands(self, ctx: Any) -> list[str]:
        return list(self.commands)  # in the order of the work, not of the alphabet

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except PeagleError as error:
            _complain(f"peagle: {error}")
            raise typer.Exit(error.exit_code) from None
        except BrokenPipeError:  # the reader, `head` say, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit complains
            raise typer.Exit(0) from None
        except OSError as error:  # a full disk, a folder that cannot be written, a file that was taken away
            cure = "make room or mend the permissions, and run the same command again"
            if isinstance(error, NotADirectoryError | FileExistsError):
                cure = "a file stands where a folder is needed; move it away, or name another place"
            _complain(f"peagle: {error}; {cure}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            _complain("peagle: stopped; the same command goes on from the last finished piece")
            raise typer.Exit(130) from None


app = typer.Typer(
    cls=_Verbs,
    no_args_is_help=True,
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    help="""Train a P-EAGLE head for speculative decoding, prove it, and ship it.

\b
One recipe (YAML) is one run. The stages, in order:
  prepare    prompts, answered by the target          -> answers/
  extract    the target's hidden states on them       -> states/
  train      the head learns from these               -> training/
  export     a directory that vLLM loads              -> head/
  evaluate   acceptance on held-out prompts           -> evaluation/

\b
All of them:        peagle run smollm2
With changed keys:  peagle run smollm2 train.steps=200 head.layers=2
Every key:          peagle recipe
""",
)

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="a YAML file, or NAME of recipes/NAME.yaml")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="keys put over the recipe, e.g. train.cod.rate=0.7"),
]


def _teach(what: str, *, reads: str, writes: str, example: str, then: str) -> str:
    return (
        f"{what}\n\n\b\nReads:    {reads}\nWrites:   {writes}\nExample:  {example}\nThen:     {then}\n\n"
        "Finished output with the same inputs is kept and the work skipped; output of other inputs is set "
        "aside, never deleted; stopped work goes on where it stopped."
    )


@app.callback(invoke_without_command=True)
def _top(version: Annotated[bool, typer.Option("--version", help="versions of everything")] = False) -> None:
    if version:
        from peagle_train.versions import versions

        for name, number in versions().items():
            typer.echo(f"{name} {number}")
        raise typer.Exit


@app.command(
    short_help="let the target answer the prompts",
    help=_teach(
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

    _stage("prepare", recipe, overrides, rows if show else None)


@app.command(
    short_help="store the target's hidden states",
    help=_teach(
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

    _stage("extract", recipe, overrides, before=resolve("data_prep.repair:repair") if repair else None)


@app.command(
    short_help="train the head",
    help=_teach(
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
    _stage("train", recipe, overrides, anew=anew)


@app.command(
    short_help="write the head as vLLM loads it",
    help=_teach(
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
        _stage("export", recipe, chosen)
        return
    from peagle_train.pipeline import export_copy
    from peagle_train.recipe import load_recipe

    wanted = load_recipe(recipe, chosen).export.format  # refuses a faulty --format before any work

    def copy(run: Any, console: Console) -> str:
        return export_copy(run, out, wanted, console)

    _stage("export", recipe, overrides, copy)


@app.command(
    short_help="measure acceptance on held-out prompts",
    help=_teach(
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
        with _open(recipe, overrides) as run:
            evaluate_other(run, head, console)
        _next(shlex.join(["peagle", "push", str(head), "s3://BUCKET/PREFIX"]), console)
        return
    with _open(recipe, overrides) as run:
        result = run_stage(run, "evaluate", console)
        finish(run, {"evaluate": result}, console)
        _next(result.next_command or next_command(run, "evaluate"), console)


@app.command(
    short_help="run every stage, then report",
    help=_teach(
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

    with _open(recipe, overrides) as opened:
        run_all(opened, console)
        _next(next_command(opened, "evaluate"), console)


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
    _next(f"peagle plan {shlex.quote(str(written.path))}", Console())


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


@app.command(
    short_help="deliver a head to S3 or the Hub",
    help="Deliver a head to S3 or the Hub: checked again, with card and checksums, and read back.\n\n"
    "\b\nReads:    HEAD, a directory that `peagle export` wrote, or a recipe (then its OUTPUT/NAME/head)\n"
    "Writes:   DEST: s3://BUCKET/PREFIX or hf://OWNER/NAME; left out: push.to of the recipe\n"
    "Example:  peagle push runs/smollm2/head s3://models/smollm2-peagle\n"
    "Then:     serve it as its card says\n\n"
    "Credentials come from the usual places of AWS and the Hub (environment, profile, login), never from "
    "the recipe.",
)
def push(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="a head's directory, or a recipe")],
    dest: Annotated[str | None, typer.Argument(metavar="DEST", help="s3://... or hf://...")] = None,
    force: Annotated[bool, typer.Option("--force", help="replace other content at DEST")] = False,
) -> None:
    directory = Path(head)
    if not directory.is_dir():
        from peagle_train.recipe import load_recipe
        from peagle_train.run import FOLDERS, run_directory

        recipe = load_recipe(head)
        directory = run_directory(recipe) / FOLDERS["export"]
        dest = dest or recipe.push.to
    if dest is None:
        raise PeagleError(
            "push: found no destination; expected s3://BUCKET/PREFIX or hf://OWNER/NAME after the head, or "
            "push.to in the recipe"
        )
    from peagle_train.delivery.push import push_head

    push_head(directory, dest, Console(), force=force)


@app.command(
    "import",
    short_help="bring a head of another maker",
    help="Read a head of any maker as vLLM reads it, prove it against its target, write it in our layout.\n\n"
    "\b\nReads:    HEAD, a folder or Hub id, plain or speculators, P-EAGLE or EAGLE-3; the target's config\n"
    "Writes:   DIR, a head as `peagle export` writes it\n"
    "Example:  peagle import owner/head --target smollm2 --out heads/theirs\n"
    "          peagle import runs/smollm2/head --target smollm2 --format speculators --out heads/ours\n"
    "Then:     peagle evaluate RECIPE --head DIR; head.start_from: DIR trains on from it\n\n"
    "All that reads otherwise afterwards is printed and recorded in DIR/export.json. No weight is rounded. A "
    "head of another target, or one with anything that vLLM would have to guess, is refused.",
)
def import_(
    head: Annotated[str, typer.Argument(metavar="HEAD", help="a head's folder, or its Hub id")],
    target: Annotated[
        str, typer.Option("--target", metavar="TARGET", help="recipe, folder, Hub id or package:NAME")
    ],
    out: Annotated[Path, typer.Option("--out", metavar="DIR", help="where it is written; must not exist")],
    format: Annotated[str, typer.Option("--format", help="plain or speculators")] = "plain",
    k: Annotated[
        int | None, typer.Option("--k", min=1, help="tokens to draft; left out: what the head recommends")
    ] = None,
    aux_layers: Annotated[
        str | None,
        typer.Option("--aux-layers", metavar="I,J,..", help="layers it reads, if its config names none"),
    ] = None,
    revision: Annotated[str | None, typer.Option("--revision", help="of the head on the Hub")] = None,
) -> None:
    layers = _layers(aux_layers)
    if format not in ("plain", "speculators"):
        raise PeagleError(f"--format: found {format!r}; expected plain or speculators")
    from peagle_train.foreign.bring import import_head

    import_head(
        head, out, target=target, console=Console(), revision=revision, format=format, k=k, aux_layers=layers
    )


@app.command(
    short_help="prove that vLLM can use a head",
    help="Prove that vLLM can load a head and draft with it: names, shapes, types, values, ids, sizes.\n\n"
    "\b\nReads:    HEAD, a directory with config.json and model.safetensors\n"
    "Writes:   nothing\n"
    "Example:  peagle check runs/smollm2/head --target smollm2\n"
    "Then:     peagle push HEAD s3://BUCKET/PREFIX",
)
def check(
    head: Annotated[Path, typer.Argument(metavar="HEAD", help="a head's directory")],
    target: Annotated[
        str | None,
        typer.Option("--target", metavar="RECIPE", help="hold it against this recipe's target too"),
    ] = None,
) -> None:
    facts = None
    if target is not None:
        from peagle_train.recipe import load_recipe
        from peagle_train.target.source import describe

        facts = describe(load_recipe(target).target)
    from peagle_train.export.checks import check_head

    report = check_head(head, facts)
    for name, value in report.rows():
        typer.echo(f"{name:<18}{value}")
    typer.echo(f"{head}: no fault found")


@app.command(
    short_help="list the data sets with names",
    help="List what `source` of a prompt set may say: data sets by name, and what each is good for.\n\n"
    "\b\nReads:    nothing\nWrites:   nothing\nExample:  peagle sources\n"
    "Then:     data.train: {source: ultrachat, split: train, count: 10000} in a recipe",
)
def sources() -> None:
    from peagle_train.pipeline import resolve

    resolve("data_prep.prompts.presets:print_table")(Console())


@app.command(
    short_help="explain every key; or check a recipe",
    help="Explain every key of a recipe with type, default and meaning; or check the recipe given.\n\n"
    "\b\nReads:    RECIPE, and its target's config\n"
    "Writes:   nothing\n"
    "Example:  peagle recipe > recipes/mine.yaml\n"
    "          peagle recipe smollm2 train.steps=200\n"
    "Then:     peagle run RECIPE",
)
def recipe(
    recipe: Annotated[
        str | None, typer.Argument(metavar="RECIPE", help="a YAML file, or NAME of recipes/NAME.yaml")
    ] = None,
    overrides: Overrides = None,
) -> None:
    if recipe is None:
        from peagle_train.recipe.fields import documentation

        typer.echo(documentation(), nl=False)
        return
    from peagle_train.recipe import check_against_target, read_recipe
    from peagle_train.recipe.yaml_text import dump

    loaded = read_recipe(recipe, overrides or ())
    from peagle_train.target.known import describe_or_known

    source = loaded.places.source
    facts, note = describe_or_known(loaded.recipe.target)
    check_against_target(loaded.recipe, facts, source, loaded.places)
    typer.echo(dump(loaded.recipe.model_dump(mode="json")), nl=False)
    if note is not None:
        _complain(f"note: {note}")
    _complain(f"{source}: no fault found; next: peagle run {source}")


def main() -> None:
    """Entry point of the `peagle` command."""
    app()


def _layers(text: str | None) -> list[int] | None:
    """`2,15,27` as a rising list."""
    if text is None:
        return None
    parts = text.strip("[]").split(",")
    try:
        layers = [int(part) for part in parts]
    except ValueError:
        layers = []
    if not layers or layers != sorted(set(layers)) or layers[0] < 0:
        raise PeagleError(f"--aux-layers: found {text!r}; expected layer ids that rise, such as 2,15,27")
    return layers


def _open(recipe: str, overrides: list[str] | None) -> Any:
    from peagle_train.run import Run

    return Run.open(recipe, overrides or (), command=("peagle", *sys.argv[1:]))


def _stage(
    name: str,
    recipe: str,
    overrides: list[str] | None,
    afterwards: Any = None,
    *,
    before: Any = None,
    **options: Any,
) -> None:
    """Runs one stage; names the next command, that of `afterwards` first.

    before, afterwards: run before and after it with (run, console). options: of the stage itself.
    """
    from peagle_train.pipeline import next_command, run_stage

    console = Console()
    with _open(recipe, overrides) as run:
        if before is not None:
            before(run, console)
        result = run_stage(run, name, console, **options)
        then = afterwards(run, console) if afterwards is not None else None
        _next(then or result.next_command or next_command(run, name), console)


def _next(command: str, console: Console) -> None:
    console.print(f"Next: {command}", markup=False, highlight=False, soft_wrap=True)


def _complain(text: str) -> None:
    typer.echo(text, err=True)
