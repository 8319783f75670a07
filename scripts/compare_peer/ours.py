"""Our side: the head of the job's recipe."""

from __future__ import annotations

from pathlib import Path

from peagle_train import Run
from peagle_train.store.states import StateStore
from scripts.compare_peer.learn import Job
from scripts.learning.ours import Ours


def build(job: Job, store: StateStore) -> Ours:
    recipe = Run.open(job.recipe, job.overrides, write=False).recipe
    folder = Path(job.vocabulary).parent
    return Ours(recipe, Path(job.target), store, job.rows, folder, seed=job.seed, rate=job.rate)
