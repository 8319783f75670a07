"""What the two data stages share: what their output depends on, the target's folder, the disk."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from rich.console import Console

from data_prep.jobs import StatesPlan
from data_prep.prompts import sources_fingerprint
from peagle_train.errors import PeagleError
from peagle_train.files import fingerprint
from peagle_train.run import Run
from peagle_train.store.answers import FORMAT as ANSWERS_FORMAT
from peagle_train.store.format import FORMAT as STATES_FORMAT
from peagle_train.store.rows import ID_BYTES, stored_bytes_at_most
from peagle_train.target.source import obtain, target_fingerprint

_ANSWER_BYTES = 16  # of a token in the answers store, as JSON text, with its share of the prompt
_ROW_BYTES = 2048  # of a row in headers, sidecar and index of the states


_SERVER = {"url", "api_key_env", "concurrency", "timeout", "retries", "max_failures"}
"""Of a server only the model's name counts: the same model answers the same at another address."""


def target_folder(run: Run, console: Console) -> Path:
    """The target's folder; obtained if need be."""
    return obtain(run.recipe.target, console)


def prepare_parts(run: Run, folder: Path) -> dict[str, Any]:
    """Everything the answers depend on. `workers` is not in it: results do not depend on it."""
    recipe = run.recipe
    return {
        "stage": "prepare",
        "format": ANSWERS_FORMAT,
        "target_fingerprint": target_fingerprint(folder),
        "target.dtype": recipe.target.dtype,
        "data": recipe.data.model_dump(mode="json", exclude={"workers": True, "server": _SERVER}),
        "sources": sources_fingerprint(recipe.data),
        # Greedy answers need no seed.
        **({"seed": recipe.seed} if any(way.temperature for way in recipe.data.sampling) else {}),
    }


def extract_parts(run: Run, prepare_fingerprint: str) -> dict[str, Any]:
    """Everything the states depend on."""
    return {
        "stage": "extract",
        "format": STATES_FORMAT,
        "prepare": prepare_fingerprint,
        "head.aux_layers": list(run.recipe.head.aux_layers),
        "states.dtype": run.recipe.states.dtype,
        # What states made beside training are made from: nothing is stored, so nothing else can be stale.
        **({"states.mode": run.recipe.states.mode} if run.recipe.states.mode != "stored" else {}),
        # Two backends agree up to rounding, not to the bit; hf is left unsaid: older stores have no such key.
        **({"states.backend": run.recipe.states.backend} if run.recipe.states.backend != "hf" else {}),
    }


def states_plan(run: Run, parts: dict[str, Any]) -> StatesPlan:
    """Where and how the states of this run are stored."""
    return StatesPlan(
        directory=str(run.states_dir),
        fingerprint=fingerprint(parts),
        aux_layers=list(run.recipe.head.aux_layers),
        hidden_size=run.facts.hidden_size,
        dtype=run.recipe.states.dtype,
        url=run.recipe.states.url,
    )


def check_disk(
    directory: Path, sizes: Iterable[tuple[int, int]], plan: StatesPlan | None, console: Console
) -> None:
    """Says how much will be written at most, before anything is. Raises PeagleError if the disk is too full.

    sizes: of each row, the most tokens it can have, and how many of them generated. States that go to a URL
    take no room here, and are told.
    """
    rows = list(sizes)
    tokens = sum(total for total, _ in rows)
    states = 0
    if plan is not None:
        states = sum(
            stored_bytes_at_most(total, generated, len(plan.aux_layers), plan.hidden_size, plan.dtype)
            + _ROW_BYTES
            for total, generated in rows
        )
    need, free = tokens * _ANSWER_BYTES + states, shutil.disk_usage(_existing(directory)).free
    sum_up = f"{len(rows):,} rows of up to {tokens / max(len(rows), 1):.0f} tokens"
    if plan is not None and plan.url is not None:
        console.print(f"at {plan.url}: at most {amount(states)} of states", highlight=False, markup=False)
        need -= states - len(rows) * _ROW_BYTES - tokens * ID_BYTES
    console.print(
        f"disk: at most {amount(need)} ({sum_up}), {amount(free)} free", highlight=False, markup=False
    )
    if need > free:
        raise PeagleError(
            f"{directory}: needs up to {amount(need)} ({sum_up}) but the disk has {amount(free)} free; lower "
            "the counts under data or data.max_new_tokens, store states in bfloat16 (states.dtype) or at a "
            "URL (states.url), or set `output` to a larger disk"
        )


def amount(size: float) -> str:
    """Bytes for people: 9.2 kB, 1.3 GB."""
    for unit in ("B", "kB", "MB", "GB"):
        if size < 1000:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1000
    return f"{size:,.1f} TB"


def _existing(path: Path) -> Path:
    while not path.exists():
        path = path.parent
    return path
