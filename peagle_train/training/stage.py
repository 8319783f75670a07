"""The training stage: from stored hidden states to the best head, resumable at every checkpoint.

Reads states/, writes training/ (see checkpoint.py). One process or many: `peagle train` runs it here,
`accelerate launch -m peagle_train.training RECIPE` runs it under any launcher.
"""

from __future__ import annotations

import os
import shlex
import shutil
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from rich.console import Console

from peagle_train.errors import PeagleError
from peagle_train.files import remove_leftovers
from peagle_train.head.choose import choose_backend
from peagle_train.head.engine import EngineSettings
from peagle_train.head.initialise import COPIED
from peagle_train.head.loss import depth_weights
from peagle_train.run import Run
from peagle_train.stages import StageResult, begin, finished, fits, reopen, require, seal, set_aside
from peagle_train.store.documents import Documents, slot_counts, trainable_rows
from peagle_train.store.source import OpenStates, StatesSource, open_stored
from peagle_train.store.states import StateStore
from peagle_train.target.parts import load_parts
from peagle_train.target.source import obtain
from peagle_train.target.tokens import end_tokens_of
from peagle_train.training.checkpoint import last_recorded, require_room_to_train
from peagle_train.training.data import Stream
from peagle_train.training.ending import why_ended
from peagle_train.training.launch import make_accelerator, wrapping
from peagle_train.training.loop import Loop, TrainingSet
from peagle_train.training.memory import (
    MemoryPlan,
    doubts,
    report_peak,
    reset_peak,
    settle_engine,
    states_bytes,
)
from peagle_train.training.module import DraftTraining
from peagle_train.training.resume import CHECKPOINTS, engine_of, refuse_another, threads_of
from peagle_train.training.signals import StoppedError
from peagle_train.training.start import make_start, mask_token_of
from peagle_train.training.together import on_main
from peagle_train.training.tracking import require_trackers, trackers
from peagle_train.training.validation import best_score
from peagle_train.training.warm_start import start_parts

FORMAT = "peagle-training-2"

FREE = {"log_every", "checkpoint_every", "keep_checkpoints", "patience", "max_hours", "on_spike", "memory"}
"""Keys that change no step: a training goes on when they change.

A spike that was met is in the log; the cut that `memory` led to is in the checkpoint.
"""


def train(
    run: Run, console: Console, *, anew: bool = False, open_states: OpenStates = open_stored
) -> StageResult:
    """Trains the head of a run.

    Args:
        run: whose states are there.
        console: what is told goes there.
        anew: begin at step 0; what stands in training/ is kept under another name.
        open_states: opens the source of rows in this process; left out: the store on the disk.

    Raises:
        PeagleError: the states are missing, stale or not finite; the loss stopped being finite; the disk is
            full.
        StaleError: an unfinished training of another recipe is there.
        StoppedError: a signal stopped the training, which is saved.
    """
    accelerator = make_accelerator(run)
    recipe, directory = run.recipe, run.training_dir
    states = require(run, "extract")
    parts = {
        "stage": "train",
        "format": FORMAT,
        "extract": states,
        "seed": recipe.seed,
        "method": recipe.method,
        # They share each step's rows: another number of them is another batch.
        "processes": accelerator.num_processes,
        "head": recipe.head.model_dump(mode="json"),
        "train": recipe.train.model_dump(mode="json", exclude=FREE),
        **start_parts(recipe.head),
    }
    done = None if anew else on_main(accelerator, lambda: _finished(run, parts, console))
    if done is not None:
        return done
    # All that can be wrong, with the inputs or on this machine, is told before an earlier training is set
    # aside: what is made until then lies in a place beside it.
    going_on = not anew and on_main(accelerator, lambda: fits(directory, parts))
    place = directory if going_on else directory.with_name(f".{directory.name}.new")
    on_main(accelerator, lambda: require_trackers(recipe.track))
    start = time.monotonic()
    store = open_states(run, states, console if accelerator.is_main_process else Console(quiet=True))
    rows, validation = (_rows(run, store, name, accelerator, console) for name in ("train", "validation"))
    if not rows or not validation:
        raise PeagleError(
            f"{run.states_dir}: {len(rows)} training and {len(validation)} validation rows have a trainable "
            "chain (an answer of at least two tokens); expected at least one of each. Raise "
            "data.max_new_tokens or the counts under data."
        )
    folder = on_main(accelerator, lambda: obtain(recipe.target, console))
    on_main(accelerator, lambda: _check_mask_token(run, folder, store))
    engine = on_main(accelerator, lambda: engine_of(place, accelerator.device))
    with closing(store), threads_of(engine), _made_beside(directory, place, accelerator):
        module = _build(run, folder, store, rows, place, accelerator, console)
        stream = Stream(
            rows,
            slot_counts(store, rows),
            recipe.seed,
            batch_tokens=recipe.train.batch_tokens,
            accumulate=recipe.train.accumulate,
            world=accelerator.num_processes,
        )
        console.print(stream.describe(), highlight=False)
        plan = on_main(accelerator, lambda: _plan_memory(run, module, stream, engine, accelerator, console))
        module.engine = plan.settings
        engine |= asdict(plan.settings)
        keep = recipe.train.keep_checkpoints
        on_main(accelerator, lambda: require_room_to_train(place, module.head, keep))
        on_main(accelerator, lambda: _begin(directory, parts, place, anew, console))
        with trackers(accelerator, recipe, directory, console) as tracking:
            loop = Loop(
                accelerator,
                module,
                TrainingSet(Documents(store, recipe.train.positions), stream, validation),
                recipe.train,
                seed=recipe.seed,
                directory=directory,
                console=console,
                tracking=tracking,
                engine=engine,
            )
            try:
                reset_peak(accelerator.device)
                standing = loop.run()
                report_peak(plan, accelerator.device, console)
            except StoppedError as stopped:
                raise StoppedError(
                    f"{stopped}; go on with: {_command(run, accelerator)}", stopped.number
                ) from None
    best = on_main(accelerator, lambda: best_score(directory / "best"))
    message = (
        f"{why_ended(standing, recipe.train)} on {len(rows)} rows; best validation acceptance length "
        f"{best['validation']['acceptance_length']:.3f} at step {best['step']}: {directory / 'best'}"
    )
    return on_main(
        accelerator,
        lambda: seal(directory, parts, time.monotonic() - start, message, run.command_for("export")),
    )


def _finished(run: Run, parts: dict[str, Any], console: Console) -> StageResult | None:
    """The result of a training that is done: of this recipe, and over by the limits that it has now."""
    directory = run.training_dir
    refuse_another(directory, parts, run.command_for("train"))
    done = finished(directory, parts, console)
    saved = last_recorded(directory / CHECKPOINTS)
    if done is None or saved is None or why_ended(saved.standing, run.recipe.train) is not None:
        return done
    console.print(f"{directory}: goes on from step {saved.standing.step}, for its limits are wider now")
    reopen(directory)
    return None


def _rows(run: Run, store: StatesSource, name: str, accelerator: Accelerator, console: Console) -> list[int]:
    """The rows of a set that can be used; without those that are not finite, if the recipe says so."""
    rows = trainable_rows(store, name)
    if not run.recipe.train.skip_bad_rows or not isinstance(store, StateStore):
        return rows  # one that is not finite is refused when it is read
    bad = store.not_finite(rows)
    if accelerator.is_main_process:
        for fault in bad.values():
            console.print(f"left out: {fault}", style="yellow", markup=False)
    return [row for row in rows if row not in bad]


def _command(run: Run, accelerator: Accelerator) -> str:
    """What takes a stopped training further."""
    if accelerator.num_processes > 1:
        arguments = shlex.join(["-m", "peagle_train.training", run.source, *run.overrides])
        return f"the same launch of {accelerator.num_processes} processes ({arguments})"
    verb = "run" if run.command[:2] == ("peagle", "run") else "train"
    return run.command_for(verb)


def _check_mask_token(run: Run, folder: Path, store: StatesSource) -> None:
    from transformers import AutoTokenizer

    trust = run.recipe.target.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    ends = end_tokens_of(folder, tokenizer, run.facts.model, trust_remote_code=trust)
    mask_token_of(run.recipe, run.facts, tokenizer, ends, store)


@contextmanager
def _made_beside(directory: Path, place: Path, accelerator: Accelerator) -> Iterator[None]:
    """`place` for the block, empty at first and gone at its end, unless it is the directory itself."""
    mine = place != directory and accelerator.is_main_process
    if mine:
        if place.exists():
            shutil.rmtree(place)  # of an attempt that was killed
        place.mkdir(parents=True)
    try:
        yield
    finally:
        if mine and place.exists():
            shutil.rmtree(place, ignore_errors=True)


def _begin(directory: Path, parts: dict[str, Any], place: Path, anew: bool, console: Console) -> None:
    if anew:
        set_aside(directory, "to be made anew (--anew)", console)
    begin(directory, parts, console)
    for folder in (directory, directory / CHECKPOINTS):
        remove_leftovers(folder)
    if place != directory:
        for file in place.iterdir():
            file.replace(directory / file.name)
        place.rmdir()


def _build(
    run: Run,
    folder: Path,
    store: StatesSource,
    rows: list[int],
    place: Path,
    accelerator: Accelerator,
    console: Console,
) -> DraftTraining:
    """The module to train. Of the target only its output rows stay.

    place: where the draft vocabulary lies, or is written to.
    """
    recipe = run.recipe
    target = load_parts(
        folder,
        dtype=recipe.target.dtype,
        layers=recipe.head.layers,
        wanted=COPIED,
        trust_remote_code=recipe.target.trust_remote_code,
    )
    quiet = console if accelerator.is_main_process else Console(quiet=True)
    # The main process writes the vocabulary map; the others read it.
    with accelerator.main_process_first():
        start = make_start(recipe, target, store, rows, place, quiet)
    torch.manual_seed(recipe.seed)
    train = recipe.train
    weights = depth_weights(train.depth_weights, train.positions, train.cod.rate, train.cod.floor)
    return DraftTraining(start.head, start.target_output, train.positions, train.loss, weights)


def _plan_memory(
    run: Run,
    module: DraftTraining,
    stream: Stream,
    engine: dict[str, Any],
    accelerator: Accelerator,
    console: Console,
) -> MemoryPlan:
    """Backend and cut of this run's batches, printed; those of its checkpoint if it goes on."""
    kind, world = wrapping(accelerator), accelerator.num_processes
    names = [field.name for field in fields(EngineSettings)]
    stored = EngineSettings(**{name: engine[name] for name in names}) if set(names) <= set(engine) else None
    train, device = run.recipe.train, accelerator.device
    dtype = torch.bfloat16 if train.precision == "bf16" else module.head.lm_head.weight.dtype
    backend, why = choose_backend(stored.backend if stored else train.backend, device, dtype, module.head)
    console.print(f"attention: {why}", highlight=False)
    plan = settle_engine(
        stored,
        module.head,
        train,
        stream.longest,
        device,
        backend=backend,
        states=states_bytes(module.head, kind, world),
        output=module.output_bytes,
        processes=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    )
    console.print(plan.table())
    for text in doubts(plan, device, half=train.precision == "bf16", kept=stored is not None):
        console.print(f"warning: {text}", style="yellow", markup=False, highlight=False)
    return plan
