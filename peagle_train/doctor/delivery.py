"""One export into a temporary folder, one load of it, and what vLLM will compute from it."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import torch
from rich.console import Console

from peagle_train.doctor.patient import Line, Patient, failure, ok
from peagle_train.export.checks import check_head
from peagle_train.export.contract import CONFIG_FILE, DTYPES
from peagle_train.export.layout import export_head, read_head
from peagle_train.export.serving import serve_command
from peagle_train.export.speculators import is_wrapped, unwrap
from peagle_train.export.stage import reference_of
from peagle_train.files import read_json
from peagle_train.head.model import DrafterHead
from peagle_train.head.rope import Rope
from peagle_train.head.session import DraftSession

_PLACES = (0, 1, 2, 17, 131, 1023, 4095)


def export(patient: Patient) -> Iterator[Line]:
    """Writes the head as `peagle export` would, which proves names, shapes, values, and equal drafts."""
    recipe, head = patient.recipe, patient.head
    directory = patient.room / "head"
    reference = reference_of(recipe.target, Console(quiet=True))
    report = export_head(
        head,
        directory,
        target=patient.facts,
        dtype=recipe.export.dtype,
        format=recipe.export.format,
        target_reference=reference,
        speculative_tokens=recipe.evaluate.k,
    )
    patient.exported = directory
    flags = "".join(f"; serving needs {flag}" for flag in report.flags)
    yield ok(f"{report.format}, {report.dtype}, {report.size / 1e6:,.1f} MB, complete and finite{flags}")
    command = serve_command(
        "HEAD",
        reference,
        recipe.evaluate.k,
        report.format,
        method=report.config.method,
        flags=report.flags,
    )
    yield ok(f"to be served with: {command}")


def rope(patient: Patient) -> Iterator[Line]:
    """The table vLLM makes from the exported config.json, by its own rules, against the one trained with."""
    config = read_json(patient.exported / CONFIG_FILE)
    if is_wrapped(config):
        config, _ = unwrap(config)
    theta = config.get("rope_theta", 10_000.0)  # what vLLM takes where none is written
    served = Rope.from_parameters(theta, config.get("rope_scaling"))
    head = patient.head.config
    places = torch.tensor([*_PLACES, head.max_position_embeddings - 1])
    apart = max(
        float((a - b).abs().max())
        for a, b in zip(
            served.angles(places, head.head_dim), head.rope.angles(places, head.head_dim), strict=True
        )
    )
    told = f"theta {served.theta:,g}, {served.rope_type}"
    if apart > 0:
        yield failure(
            f"vLLM will turn by {told}, up to {apart:.2g} away from theta {head.rope.theta:,g}, "
            f"{head.rope.rope_type}, which the head was trained with",
            "the exporter lost the RoPE: report it",
        )
    elif config["max_position_embeddings"] < patient.facts.max_position_embeddings:
        yield failure(
            f"the head reaches {config['max_position_embeddings']:,} tokens, its target "
            f"{patient.facts.max_position_embeddings:,}",
            "leave head.max_position_embeddings out",
        )
    else:
        yield ok(
            f"vLLM will turn by {told}, up to {config['max_position_embeddings']:,} tokens, as in training"
        )


def load(patient: Patient) -> Iterator[Line]:
    """Reads the folder as a stranger's, and drafts from the rows' own states."""
    check_head(patient.exported, patient.facts)
    stored = _plain(read_head(patient.exported, shared_embeddings=patient.table), torch.float32)
    trained = _plain(patient.head, DTYPES[patient.recipe.export.dtype])
    k, drafts, other = patient.recipe.evaluate.k, 0, 0
    for info in patient.store.info():
        row = patient.store.read(info.row)
        known, aux = row.token_ids[1 : row.prompt_length + 1], row.aux[: row.prompt_length]
        ours, theirs = (DraftSession(head).draft(known, aux, k)[0] for head in (trained, stored))
        drafts += k
        other += int((ours != theirs).sum())
    if other:
        yield failure(
            f"{other} of {drafts} drafted tokens differ from those of the trained head",
            "the export changed the head: report it",
        )
    else:
        yield ok(f"read back, it drafts the trained head's tokens: {drafts} of {drafts}")


def _plain(head: DrafterHead, dtype: torch.dtype) -> DrafterHead:
    """A copy on the CPU that computes in float32 with weights rounded to `dtype`."""
    return copy.deepcopy(head).cpu().to(dtype).float().eval()
