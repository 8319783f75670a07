"""Which engines are started: the jobs of a second pass that a vLLM makes."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import torch

import data_prep
from data_prep.jobs import Job, VllmPlan
from peagle_train.errors import PeagleError
from peagle_train.run import Run

VARIABLE = "VLLM_PYTHON"
_BESIDE = Path(".venv-vllm") / "bin" / "python"


def vllm_jobs(job: Job, run: Run) -> list[Job]:
    """The shares of `job`, one for each engine.

    An engine takes all GPUs for a target that is larger than one (target.parallel); otherwise each GPU has
    an engine of its own. On a CPU there is one, or data.workers of them.
    Raises PeagleError where no interpreter is found, and for a row longer than the target's context.
    """
    python, facts = find_python(), run.facts
    rows = [row for batch in job.answered.values() for row in batch]
    longest = max(rows, key=lambda row: len(row.token_ids))
    if len(longest.token_ids) > facts.max_position_embeddings:
        raise PeagleError(
            f"row {longest.row} ({longest.set} {longest.id}) has {len(longest.token_ids)} tokens; vLLM reads "
            f"no more than the target's context of {facts.max_position_embeddings}: lower "
            "data.max_prompt_tokens or data.max_new_tokens, or set states.backend=hf"
        )
    gpus = _gpus(job.device)
    if run.recipe.target.parallel != "none":
        shares: list[int | None] = [None]
    elif gpus:
        shares = [*gpus[: run.recipe.data.workers]]
    else:
        shares = [None] * (run.recipe.data.workers or 1)
    batches = sorted(job.answered)
    count = min(len(shares), len(batches))
    assert job.states is not None
    return [
        replace(
            job,
            threads=None if gpus else 1,
            answered={batch: job.answered[batch] for batch in batches[number::count]},
            vllm=VllmPlan(
                python=str(python),
                log=str(Path(job.states.directory) / f"vllm-{number}.log"),
                num_layers=facts.num_layers,
                longest=len(longest.token_ids),
                batch_tokens=run.recipe.states.batch_tokens,
                gpu=shares[number],
                all_gpus=run.recipe.target.parallel != "none",
            ),
        )
        for number in range(count)
    ]


def find_python() -> Path:
    """The interpreter that has vLLM: $VLLM_PYTHON, else .venv-vllm here or beside the sources.

    Raises PeagleError where there is none.
    """
    named = os.environ.get(VARIABLE)
    beside = Path(data_prep.__file__).resolve().parent.parent / _BESIDE
    places = [Path(named).expanduser()] if named else [Path.cwd() / _BESIDE, beside]
    for place in places:
        if os.access(place, os.X_OK) and place.is_file():
            return place.absolute()  # not resolved: a virtual environment is known by the link's place
    raise PeagleError(
        f"states.backend is vllm, but there is no interpreter at {' or '.join(map(str, places))}; name one "
        f"that has vLLM 0.32: {VARIABLE}=/path/to/python (docs/extraction-vllm.md says how to install it), "
        "or set states.backend=hf"
    )


def _gpus(device: str) -> list[int]:
    """The GPUs that target.device stands for; none on a CPU."""
    kind, _, number = device.partition(":")
    if kind == "cpu":
        return []
    return [int(number)] if number else list(range(torch.cuda.device_count()))
