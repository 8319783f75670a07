"""`peagle import`: a head of any maker becomes a directory of ours, proven, with the way on from there."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from peagle_train.delivery.card import DEFAULT_K
from peagle_train.errors import PeagleError
from peagle_train.export.checks import HeadReport
from peagle_train.export.layout import export_head
from peagle_train.export.serving import serve_command
from peagle_train.export.stage import print_report, reference_of
from peagle_train.foreign.findings import Change
from peagle_train.foreign.read import ForeignHead, read_foreign
from peagle_train.foreign.source import head_folder, target_of
from peagle_train.recipe.head import head_section
from peagle_train.recipe.yaml_text import dump
from peagle_train.target.source import describe


def import_head(
    source: str,
    out: Path,
    *,
    target: str,
    console: Console,
    revision: str | None = None,
    format: str = "plain",
    k: int | None = None,
    aux_layers: Sequence[int] | None = None,
) -> HeadReport:
    """Reads a head, writes it to `out` in our layout, proves it, and says how to go on.

    Args:
        source: the head's folder or Hub id; also a head of ours, to have it in the other format.
        target: recipe, folder, Hub id or package of the model it drafts for.
        revision: of the head on the Hub.
        format: plain or speculators.
        k: tokens to draft, written into a speculators config; None: what the head recommends.
        aux_layers: the layers the head was trained on, if its config does not name them.

    Raises:
        HeadFault: with all that is wrong with the head; nothing is written then.
        PeagleError: head or target are not to be found, something stands at `out`, or K is missing.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise PeagleError(f"{out}: found something there; expected no such path or an empty folder")
    section, recipe = target_of(target)
    facts = describe(section)
    folder = head_folder(source, revision)
    foreign = read_foreign(folder, facts, aux_layers=aux_layers)
    drafts = k or foreign.k
    if format == "speculators" and drafts is None:
        raise PeagleError(
            f"{source}: found no number of tokens to draft in the head; expected one, since a speculators "
            f"config holds it; name it: --k {DEFAULT_K}"
        )
    served = drafts or (recipe.evaluate.k if recipe else DEFAULT_K)
    reference = reference_of(section, console)
    report = export_head(
        foreign.head,
        out,
        target=facts,
        dtype=foreign.dtype,
        format=format,
        target_reference=reference,
        speculative_tokens=served,
        extra=_provenance(foreign, source, revision, drafts),
    )
    _print_changes(foreign.changes, source, console)
    method, flags = report.config.method, report.flags
    print_report(
        report, serve_command(out, reference, served, report.format, method=method, flags=flags), console
    )
    if drafts is None:
        _say(console, f"(the head recommends no number of tokens to draft; {served} is the command's)")
    _say(console, "\nGo on training from it with this in a recipe:")
    kind = {} if method == "peagle" else {"method": method}
    _say(console, dump({**kind, "head": head_section(report.config, facts, str(out))}))
    measured = target if recipe else "RECIPE"
    _say(console, f"Measure it: {shlex.join(['peagle', 'evaluate', measured, '--head', str(out)])}")
    _say(console, f"Next: {shlex.join(['peagle', 'push', str(out), 's3://BUCKET/PREFIX'])}")
    return report


def _provenance(foreign: ForeignHead, source: str, revision: str | None, k: int | None) -> dict[str, Any]:
    """What a head of ours recorded stays; where it was read from, and what was changed, is added."""
    imported = {
        "source": source,
        "revision": revision,
        "format": foreign.format,
        "sha256": foreign.sha256,
        "changes": [{"what": c.what, "found": c.found, "now": c.now} for c in foreign.changes],
    }
    known = {} if k is None else {"k": k}
    return {**foreign.provenance, **known, "imported": imported}


def _print_changes(changes: list[Change], source: str, console: Console) -> None:
    if not changes:
        _say(console, f"{source}: nothing had to be put into other words")
        return
    table = Table(title=f"Put into other words: {source}")
    for name in ("what", "found", "now"):
        table.add_column(name, overflow="fold")
    for change in changes:
        table.add_row(Text(change.what), Text(change.found), Text(change.now))  # no markup of a stranger's
    console.print(table)


def _say(console: Console, text: str) -> None:
    console.print(text, markup=False, highlight=False, soft_wrap=True)
