"""The training stage: from stored hidden states to the best head, resumable at every checkpoint.

Reads states/, writes training/ (see checkpoint.py). One process or many: `peagle train` runs it here,
`accelerate launch -m peagle_train.training RECIPE` runs it under any launcher.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from accelerate import Accelerator
from accelerate.utils import broadcast_object_list
from rich.console import Console

from peagle_train.errors import PeagleError
from peagle_train.files import remove_leftovers
from peagle_train.run import Run
from peagle_train.stages import StageResult, begin, finished, require, seal
from peagle_train.store.documents import Documents, slot_counts, trainable_rows
from peagle_train.store.states import StateStore
from peagle_train.target.adapter import Target
from peagle_train.target.source import obtain
from peagle_train.target.tokens import end_tokens_of
from peagle_train.training.data import Stream
from peagle_train.training.launch import make_accelerator
from peagle_train.training.loop import Loop, TrainingSet
from peagle_train.training.module import DraftTraining
from peagle_train.training.start import make_start, mask_token_of
from peagle_train.training.tracking import require_trackers, trackers
from peagle_train.training.warm_start import start_parts

T = TypeVar("T")
FORMAT = "peagle-training-1"


def train(run: Run, console: Console) -> StageResult:
    """Trains the head of a run.

    Raises:
        PeagleError: the states are missing or stale, or the loss stopped being finite.
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
        "train": recipe.train.model_dump(mode="json", exclude={"log_every", "checkpoint_every"}),
        **start_parts(recipe.head),
    }
    done = _on_main(accelerator, lambda: finished(directory, parts, console))
    if done is not None:
        return done
    # All that can be wrong with the inputs is told before an earlier training is set aside.
    _on_main(accelerator, lambda: require_trackers(recipe.track))
    start = time.monotonic()
    store = StateStore(run.states_dir, expected=states)
    rows, validation = trainable_rows(store, "train"), trainable_rows(store, "validation")
    if not rows or not validation:
        raise PeagleError(
            f"{run.states_dir}: {len(rows)} training and {len(validation)} validation rows have a trainable "
            "chain (an answer of at least two tokens); expected at least one of each. Raise "
            "data.max_new_tokens or the counts under data."
        )
    folder = _on_main(accelerator, lambda: obtain(recipe.target, console))
    _on_main(accelerator, lambda: _check_mask_token(run, folder, store))
    _on_main(accelerator, lambda: _begin(directory, parts, console))
    module = _build(run, folder, store, rows, accelerator, console)
    stream = Stream(
        rows,
        slot_counts(store, rows),
        recipe.seed,
        batch_tokens=recipe.train.batch_tokens,
        accumulate=recipe.train.accumulate,
        world=accelerator.num_processes,
    )
    console.print(stream.describe(), highlight=False)
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
        )
        standing = loop.run()
    message = (
        f"{recipe.train.steps} steps on {len(rows)} rows; best validation acceptance length "
        f"{standing.best_acceptance:.3f} at step {standing.best_step}: {directory / 'best'}"
    )
    result = _on_main(
        accelerator,
        lambda: seal(directory, parts, time.monotonic() - start, message, run.command_for("export")),
    )
    return result


def _check_mask_token(run: Run, folder: Path, store: StateStore) -> None:
    from transformers import AutoTokenizer

    trust = run.recipe.target.trust_remote_code
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust)
    ends = end_tokens_of(folder, tokenizer, run.facts.model, trust_remote_code=trust)
    mask_token_of(run.recipe, run.facts, tokenizer, ends, store)


def _begin(directory: Path, parts: dict[str, Any], console: Console) -> None:
    begin(directory, parts, console)
    for folder in (directory, directory / "checkpoints"):
        remove_leftovers(folder)


def _build(
    run: Run, folder: Path, store: StateStore, rows: list[int], accelerator: Accelerator, console: Console
) -> DraftTraining:
    """The module to train. The target is loaded for its tables and let go: only output rows stay."""
    recipe = run.recipe
    target = Target.load(
        folder,
        dtype=recipe.target.dtype,
        device="cpu",
        trust_remote_code=recipe.target.trust_remote_code,
    )
    quiet = console if accelerator.is_main_process else Console(quiet=True)
    # The main process writes the vocabulary map; the others read it.
    with accelerator.main_process_first():
        start = make_start(recipe, target, store, rows, run.training_dir, quiet)
    torch.manual_seed(recipe.seed)
    return DraftTraining(start.head, start.target_output, recipe.train.positions, recipe.train.loss)


def _on_main(accelerator: Accelerator, action: Callable[[], T]) -> T:
    """Runs `action` in the main process and gives every process its result."""
    result: list[Any] = [action() if accelerator.is_main_process else None]
    if accelerator.num_processes > 1:
        broadcast_object_list(result, from_process=0)
    return cast(T, result[0])
