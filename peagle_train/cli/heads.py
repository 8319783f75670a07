"""Verbs for a finished head: deliver it, bring one of another maker, prove it."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from peagle_train.cli.app import (
    app,
)
from peagle_train.errors import PeagleError


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
