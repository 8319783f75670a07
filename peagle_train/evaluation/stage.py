"""The evaluation stage: acceptance on every held-out set, measured twice.

    offline   all rows of a set, from their stored answers, teacher-forced
    loop      a few rows of each set through real speculative decoding, whose output must be the
              stored answer: the target's plain greedy decoding, made without any head

Where the loop reproduced the answer, both must have counted the same; a difference is an error, not a
footnote. Reads states/ and head/, writes evaluation/results.json.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from peagle_train.errors import PeagleError
from peagle_train.evaluation.loop import NEAR_TIE, first_difference, gap_after, speculate
from peagle_train.export.checks import HeadFault, check_head
from peagle_train.export.contract import CONFIG_FILE
from peagle_train.export.layout import read_head
from peagle_train.files import sha256_of, write_json
from peagle_train.head.acceptance import Acceptance, offline_acceptance, total
from peagle_train.head.io import RECORD_FILE
from peagle_train.head.model import DrafterHead
from peagle_train.recipe.schema import Recipe
from peagle_train.run import FOLDERS, Run
from peagle_train.stages import StageResult, begin, finished, require, seal
from peagle_train.store.documents import Documents
from peagle_train.store.source import OpenStates, StatesSource, open_stored
from peagle_train.summary import RESULTS, print_acceptance, read_results
from peagle_train.target.adapter import Target
from peagle_train.target.source import obtain

FORMAT = "peagle-evaluation-1"
ROWS_AT_ONCE = 8


def evaluate(run: Run, console: Console, *, open_states: OpenStates = open_stored) -> StageResult:
    """Measures the exported head of a run on its held-out sets.

    Raises:
        PeagleError: an earlier stage is missing or stale, or the two measures disagree.
    """
    recipe = run.recipe
    parts: dict[str, Any] = {
        "stage": "evaluate",
        "format": FORMAT,
        "extract": require(run, "extract"),
        "export": require(run, "export"),
        "evaluate": recipe.evaluate.model_dump(mode="json"),
    }
    directory = run.evaluation_dir
    done = finished(directory, parts, console)
    if done is not None:
        return done
    return _measured_into(directory, parts, run, run.head_dir, console, open_states)


def evaluate_head(
    run: Run, head_dir: Path, console: Console, *, open_states: OpenStates = open_stored
) -> StageResult:
    """Measures any head directory on the states of a run; the run's own head and results stay as they are.

    Reads states/ and the head, writes evaluation-NAME-SHA/results.json in the run's folder.

    Raises:
        HeadFault: the directory is not a sound head for the run's target.
        PeagleError: the states are missing or stale, or they are of other layers than the head's.
    """
    recipe = run.recipe
    extract = require(run, "extract")
    try:
        report = check_head(head_dir, run.facts)
    except HeadFault as error:
        if not (head_dir / CONFIG_FILE).is_file() or (head_dir / RECORD_FILE).is_file():
            raise
        cure = f"peagle import {head_dir} --target {run.source} --out DIR"
        raise PeagleError(
            f"{error}\nIf another program wrote this head, bring it in first: {cure}"
        ) from error
    if list(report.config.aux_layers) != run.recipe.head.aux_layers:
        layers = ",".join(map(str, report.config.aux_layers))
        raise PeagleError(
            f"{head_dir}: reads the layers [{layers}]; expected {run.recipe.head.aux_layers}, whose states "
            f"this run has; for those of this head add `head.aux_layers=[{layers}] name=ANOTHER` "
            "to peagle prepare, extract and evaluate"
        )
    parts: dict[str, Any] = {
        "stage": "evaluate",
        "format": FORMAT,
        "extract": extract,
        "weights_sha256": report.weights_sha256,
        "config_sha256": sha256_of(head_dir / CONFIG_FILE),
        "evaluate": recipe.evaluate.model_dump(mode="json"),
    }
    name = f"{FOLDERS['evaluate']}-{head_dir.resolve().name}-{report.weights_sha256[:8]}"
    directory = run.directory / name
    result = finished(directory, parts, console) or _measured_into(
        directory, parts, run, head_dir, console, open_states
    )
    print_acceptance(read_results(directory / RESULTS), recipe.evaluate.k, console)
    return result if result.skipped else replace(result, message=f"{directory}: {result.message}")


def _measured_into(
    directory: Path,
    parts: dict[str, Any],
    run: Run,
    head_dir: Path,
    console: Console,
    open_states: OpenStates,
) -> StageResult:
    """Measures a head on the run's states, and leaves the results in `directory`."""
    k = run.recipe.evaluate.k
    begin(directory, parts, console)
    start = time.monotonic()
    target = _target(run, console)
    head = read_head(head_dir, shared_embeddings=target.embedding_table().cpu())
    with closing(open_states(run, parts["extract"], console, target)) as store:
        sets = measure(head, target, store, run.recipe, console)
    write_json(directory / RESULTS, {"k": k, "near_tie": NEAR_TIE, "sets": sets})
    return seal(directory, parts, time.monotonic() - start, _lengths(sets, k))


def measure(
    head: DrafterHead, target: Target, store: StatesSource, recipe: Recipe, console: Console
) -> dict[str, Any]:
    """Offline and loop figures of a head by held-out set, as results.json keeps them."""
    head = head.to(device=target.device, dtype=target.dtype).eval()
    documents = Documents(store, recipe.evaluate.k)
    sets: dict[str, Any] = {}
    with _progress(console) as progress:
        for name in recipe.data.heldout:
            rows = [info.row for info in store.info(name)]
            task = progress.add_task(f"{name}, offline", total=len(rows))
            counts: dict[int, Acceptance] = {}
            for i in range(0, len(rows), ROWS_AT_ONCE):
                chunk = rows[i : i + ROWS_AT_ONCE]
                store.upcoming(chunk)
                measured = offline_acceptance(head, [documents.full(r) for r in chunk], recipe.evaluate.k)
                counts.update(zip(chunk, measured, strict=True))
                progress.advance(task, len(chunk))
            looped = [row for row in rows if _one_turn(store, row)][: recipe.evaluate.loop_prompts]
            task = progress.add_task(f"{name}, loop", total=len(looped))
            loop = LoopResult(recipe.evaluate.k)
            for row in looped:
                loop.add(_one_loop(target, head, store, row, recipe.evaluate.k, counts[row]))
                progress.advance(task)
            offline = total(counts.values(), recipe.evaluate.k)
            tokens = sum(info.supervised for info in store.info(name))
            sets[name] = {
                "offline": {**_numbers(offline), "prompts": len(rows), "tokens": tokens},
                "loop": loop.to_dict(),
            }
    return sets


def _target(run: Run, console: Console) -> Target:
    section = run.recipe.target
    return Target.of(section, obtain(section, console))


def _lengths(sets: dict[str, Any], k: int) -> str:
    lengths = [f"{name} {figures['offline']['acceptance_length']:.3f}" for name, figures in sets.items()]
    return f"acceptance length at K = {k}: {', '.join(lengths)}"


@dataclass
class OneLoop:
    """One prompt through the loop: its counts, and how its output relates to plain greedy decoding."""

    acceptance: Acceptance
    tokens: int
    equal: bool
    near_tie: bool


@dataclass
class LoopResult:
    """The loop over some prompts of a set."""

    k: int
    runs: list[OneLoop] = field(default_factory=list)

    def add(self, one: OneLoop) -> None:
        self.runs.append(one)

    def to_dict(self) -> dict[str, Any]:
        """Counts; lossless: every output equals plain greedy decoding, or parts from it at a near tie."""
        return {
            **_numbers(total((r.acceptance for r in self.runs), self.k)),
            "prompts": len(self.runs),
            "tokens": sum(r.tokens for r in self.runs),
            "lossless": all(r.equal or r.near_tie for r in self.runs),
            "near_ties": sum(r.near_tie for r in self.runs),
        }


def _one_turn(store: StatesSource, row: int) -> bool:
    """Whether all that follows the prompt was generated in one go: what the loop can make again."""
    return bool(store.loss_mask(row)[store.info_of(row).prompt_length :].all())


def _one_loop(
    target: Target, head: DrafterHead, store: StatesSource, row_index: int, k: int, offline: Acceptance
) -> OneLoop:
    row, ids = store.info_of(row_index), store.token_ids(row_index)
    prompt, stored = ids[: row.prompt_length].tolist(), ids[row.prompt_length :].tolist()
    spoken = speculate(target, head, prompt, k, len(stored))
    different = first_difference(spoken.token_ids, stored)
    near_tie = different is not None and gap_after(target, [*prompt, *stored[:different]]) < NEAR_TIE
    counted = spoken.acceptance
    if spoken.token_ids == stored and (counted.num_drafts, counted.accepted_at) != (
        offline.num_drafts,
        offline.accepted_at,
    ):
        raise PeagleError(
            f"row {row_index} ({row.id}): the loop counted {counted.num_drafts} drafts, accepted "
            f"{counted.accepted_at}; the stored answer gives {offline.num_drafts}, {offline.accepted_at}. "
            "They must agree on the same answer: the stored states do not belong to this target, or their "
            "dtype (states.dtype) is coarser than the target's."
        )
    return OneLoop(counted, len(spoken.token_ids), different is None, near_tie)


def _numbers(counts: Acceptance) -> dict[str, Any]:
    return {
        "acceptance_length": round(counts.acceptance_length, 4),
        "per_position": [round(p, 4) for p in counts.per_position],
        "num_drafts": counts.num_drafts,
        "num_accepted": counts.num_accepted,
    }


def _progress(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("prompts"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )
