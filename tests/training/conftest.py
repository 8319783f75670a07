"""A tiny target and a store of its own greedy answers, made once for all training tests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from rich.console import Console

from data_prep.answer import answer
from peagle_train import Run
from peagle_train.pipeline import run_stage
from peagle_train.store.states import StateRow, StateStore, StateWriter
from peagle_train.target.adapter import Target
from peagle_train.twin.models import tiny_llama
from tests.data_prep.inline import InlineJobs
from tests.tiny_run import tiny_recipe

AUX_LAYERS = [1, 2, 3]


@dataclass(frozen=True)
class Made:
    """The target and the store of its answers: 24 training rows, 8 to validate."""

    target: Target
    store: StateStore


@pytest.fixture(scope="session")
def made(tmp_path_factory: pytest.TempPathFactory) -> Made:
    folder = tmp_path_factory.mktemp("made")
    target = Target.load(tiny_llama(folder / "target"), dtype="float32", device="cpu")
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(5, 110, (8 + i % 5,), generator=generator).tolist() for i in range(32)]
    answers = answer(target, prompts, max_new_tokens=24, aux_layers=AUX_LAYERS, keep=torch.float32)
    (folder / "states").mkdir()
    writer = StateWriter(folder / "states", "made", AUX_LAYERS, target.facts.hidden_size, "float32")
    rows = []
    for i, a in enumerate(answers):
        mask = torch.zeros(len(a.token_ids), dtype=torch.bool)
        mask[a.prompt_length :] = True
        assert a.aux is not None and a.last is not None
        name = "train" if i < 24 else "validation"
        rows.append(
            StateRow(i, name, f"p{i}", torch.tensor(a.token_ids), mask, a.aux, a.last, a.prompt_length)
        )
    writer.write_batch(0, rows)
    writer.seal()
    return Made(target, StateStore(folder / "states"))


@pytest.fixture(scope="session")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe whose states are there: the run `base`, to be linked to by runs of other names."""
    folder = tmp_path_factory.mktemp("recipe")
    cadence = {"log_every": 1, "validate_every": 3, "checkpoint_every": 4}
    train = {"positions": 4, "batch_tokens": 96, **cadence}
    path = tiny_recipe(folder, "base", heldout=1, train=train, evaluate={"k": 4})
    with Run.open(path) as run, pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_prep.prepare.run_jobs", InlineJobs())
        patch.setattr("data_prep.extract.run_jobs", InlineJobs())
        for stage in ("prepare", "extract"):
            run_stage(run, stage, Console(quiet=True))
    return path
