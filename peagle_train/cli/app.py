"""The command itself, and what its verbs share: how they open a run, do a stage, and name what comes next."""

from __future__ import annotations

import os
import sys
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
            complain(f"peagle: {error}")
            raise typer.Exit(error.exit_code) from None
        except BrokenPipeError:  # the reader, `head` say, has seen enough
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the flush at exit complains
            raise typer.Exit(0) from None
        except OSError as error:  # a full disk, a folder that cannot be written, a file that was taken away
            cure = "make room or mend the permissions, and run the same command again"
            if isinstance(error, NotADirectoryError | FileExistsError):
                cure = "a file stands where a folder is needed; move it away, or name another place"
            complain(f"peagle: {error}; {cure}")
            raise typer.Exit(1) from None
        except KeyboardInterrupt:
            complain("peagle: stopped; the same command goes on from the last finished piece")
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


def teach(what: str, *, reads: str, writes: str, example: str, then: str) -> str:
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


def open_run(recipe: str, overrides: list[str] | None) -> Any:
    from peagle_train.run import Run

    return Run.open(recipe, overrides or (), command=("peagle", *sys.argv[1:]))


def do_stage(
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
    with open_run(recipe, overrides) as run:
        if before is not None:
            before(run, console)
        result = run_stage(run, name, console, **options)
        then = afterwards(run, console) if afterwards is not None else None
        tell_next(then or result.next_command or next_command(run, name), console)


def tell_next(command: str, console: Console) -> None:
    console.print(f"Next: {command}", markup=False, highlight=False, soft_wrap=True)


def complain(text: str) -> None:
    typer.echo(text, err=True)
