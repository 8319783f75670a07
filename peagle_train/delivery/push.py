"""`peagle push`: a head goes to S3 or the Hub, and counts as delivered once it was read back.

    head folder ──► export check ──► card + manifest (in a temporary folder) ──► s3.deliver | hub.deliver

The head's folder is only read. Pushing the same head to the same place again sends nothing; other
content there is replaced only if that is asked for.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from peagle_train.delivery import hub, s3
from peagle_train.delivery.card import DEFAULT_K, CardFacts, make_card
from peagle_train.delivery.hub import HubPlace
from peagle_train.delivery.manifest import (
    CARD_NAME,
    MANIFEST_NAME,
    Comparison,
    FileEntry,
    Manifest,
    head_files,
)
from peagle_train.delivery.progress import transfer_bar
from peagle_train.delivery.s3 import S3Place
from peagle_train.errors import CorruptError, PeagleError
from peagle_train.files import read_json

if TYPE_CHECKING:
    from peagle_train.export.checks import HeadReport
    from peagle_train.run import Run
    from peagle_train.stages import StageResult


@dataclass(frozen=True)
class PushReceipt:
    """Proof of a delivery.

    destination: as it was asked for.
    location: where the head is; for the Hub the address of the commit.
    already_there: nothing was sent, since the same head stood there.
    sent: names of the files that were sent, without the manifest.
    files, size: number of files of the head, card included, and their bytes.
    manifest_sha256: SHA-256 of manifest.json; it names this head and this card.
    """

    destination: str
    location: str
    already_there: bool
    sent: tuple[str, ...]
    files: int
    size: int
    manifest_sha256: str
    seconds: float


def push_head(head: Path, destination: str, console: Console, *, force: bool = False) -> PushReceipt:
    """Checks a head, delivers it, and reads it back.

    Args:
        head: a folder that `peagle export` wrote, in either format.
        destination: `s3://bucket/prefix` or `hf://owner/name[@branch]`.
        console: where progress is shown.
        force: replace other content at the destination.

    Raises:
        HeadFault: the head fails its check.
        StaleError: other content stands at the destination.
        CorruptError: what was read back differs from what was sent.
        PeagleError: destination, credentials or service are not usable.
    """
    place = parse_destination(destination)
    # Last, since it loads torch: a mistyped destination is refused at once.
    from peagle_train.export.checks import check_head

    started = time.monotonic()
    head = Path(head)
    report = check_head(head, None)
    with tempfile.TemporaryDirectory(prefix="peagle-push-") as temporary:
        paths = head_files(head)
        with transfer_bar(console, "Hashing", sum(path.stat().st_size for path in paths.values())) as advance:
            entries = dict(Manifest.of(paths, advance).files)
        if CARD_NAME in paths:
            _say(console, f"{CARD_NAME} of the head's folder is sent as it is")
        else:
            paths[CARD_NAME] = Path(temporary) / CARD_NAME
            paths[CARD_NAME].write_text(_card(head, report, place, entries, console), encoding="utf-8")
            entries |= Manifest.of({CARD_NAME: paths[CARD_NAME]}).files
        manifest = Manifest(entries)
        paths[MANIFEST_NAME] = Path(temporary) / MANIFEST_NAME
        paths[MANIFEST_NAME].write_text(manifest.to_json(), encoding="utf-8")
        seal = Manifest.of({MANIFEST_NAME: paths[MANIFEST_NAME]}).files[MANIFEST_NAME]
        done, location = _deliver(place, paths, manifest, console, force=force)
    receipt = PushReceipt(
        destination=destination,
        location=location,
        already_there=done.complete,
        sent=done.send,
        files=len(entries),
        size=manifest.size,
        manifest_sha256=seal.sha256,
        seconds=time.monotonic() - started,
    )
    if done.kept:
        _say(console, f"Left alone, no part of the head: {', '.join(done.kept)}")
    _say(console, summary_line(receipt))
    return receipt


def summary_line(receipt: PushReceipt) -> str:
    """One line for the user: what happened, and where the head is."""
    megabytes = f"{receipt.files} files, {receipt.size / 1e6:,.1f} MB"
    if receipt.already_there:
        return f"Already there, nothing sent: {receipt.location} ({megabytes}, read back and equal)"
    return f"Delivered: {receipt.location} ({megabytes}, read back and equal, {receipt.seconds:.1f} s)"


def parse_destination(destination: str) -> S3Place | HubPlace:
    """Reads a destination. Raises PeagleError for anything but the two schemes, and for malformed ones."""
    if destination.startswith("s3://"):
        return S3Place.parse(destination)
    if destination.startswith("hf://"):
        return HubPlace.parse(destination)
    raise PeagleError(
        f"{destination}: cannot push there; expected s3://bucket/prefix or hf://owner/name[@branch]"
    )


def push(run: Run, console: Console) -> StageResult:
    """The stage: delivers the run's head to the place that the recipe names in `push.to`."""
    from peagle_train.stages import StageResult, require

    destination = run.recipe.push.to
    if destination is None:
        raise PeagleError(
            f"{run.source}: push.to: not set; expected s3://bucket/prefix or hf://owner/name. "
            "Add it to the recipe, or push the folder itself: peagle push HEAD s3://bucket/prefix"
        )
    require(run, "export")
    receipt = push_head(run.head_dir, destination, console)
    return StageResult(
        name="push",
        seconds=receipt.seconds,
        skipped=receipt.already_there,
        message=summary_line(receipt),
        next_command=None,
    )


def _deliver(
    place: S3Place | HubPlace, paths: dict[str, Path], manifest: Manifest, console: Console, *, force: bool
) -> tuple[Comparison, str]:
    if isinstance(place, S3Place):
        return s3.deliver(place, paths, manifest, console, force=force)
    return hub.deliver(place, paths, manifest, console, force=force)


def _card(
    head: Path,
    report: HeadReport,
    place: S3Place | HubPlace,
    entries: Mapping[str, FileEntry],
    console: Console,
) -> str:
    """The card of this head for this place."""
    from peagle_train.export.serving import serve_command

    record = _read_object(head / "export.json")
    provenance, target = (_section(record, key) for key in ("provenance", "target"))
    results = _measured(head, console)
    k = results.get("k", provenance.get("k"))
    k = k if isinstance(k, int) else None
    if isinstance(place, HubPlace):
        served, fetch = place.repo_id, None
    else:
        served, fetch = f"./{place.title}", f"aws s3 cp --recursive {place.url} ./{place.title}"
    reference = str(target.get("reference", report.target or "TARGET"))
    if Path(reference).is_absolute():
        _say(
            console,
            f"note: this head names its target by a folder of this machine ({reference}), which its readers "
            "do not have. To publish it, set target.model to a Hub id and export again.",
        )
        reference = Path(reference).name
    facts = CardFacts(
        report=report,
        provenance=provenance,
        acceptance=results.get("sets", {}),
        k=k,
        title=place.title,
        serve=serve_command(
            served,
            reference,
            k or DEFAULT_K,
            report.format,
            method=report.config.method,
            flags=report.flags,
        ),
        fetch=fetch,
    )
    return make_card(facts, entries)


def _measured(head: Path, console: Console) -> dict[str, Any]:
    """The evaluation beside the head in its run's folder, provided that it measured this very export."""
    from peagle_train.run import FOLDERS
    from peagle_train.stages import read_record

    evaluation = head.resolve().parent / FOLDERS["evaluate"]
    exported, evaluated = read_record(head), read_record(evaluation)
    if evaluated is None or evaluated.finished is None:
        return {}
    if exported is None or evaluated.parts.get("export") != exported.fingerprint:
        _say(console, f"{evaluation} measured another export: left out of the card")
        return {}
    return _read_object(evaluation / "results.json")


def _say(console: Console, message: str) -> None:
    """Prints as it is: addresses are not coloured, folded or read as markup."""
    console.print(message, markup=False, highlight=False, soft_wrap=True)


def _section(record: dict[str, Any], key: str) -> dict[str, Any]:
    """A part of a record that may be a stranger's; empty if it is missing or no object."""
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def _read_object(path: Path) -> dict[str, Any]:
    """A JSON object of ours; empty if there is no such file."""
    if not path.exists():
        return {}
    value = read_json(path)
    if not isinstance(value, dict):
        raise CorruptError(
            f"{path}: holds a {type(value).__name__}; expected an object; make it again or move it"
        )
    return value
