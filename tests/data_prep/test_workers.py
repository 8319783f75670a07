"""Real worker processes: a real SIGKILL and the resume after it, a worker that dies, a fault it reports."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from rich.console import Console

from data_prep import prepare as prepare_stage
from data_prep.chat import Rendered
from data_prep.jobs import Job
from data_prep.prepare import prepare
from data_prep.workers import run_jobs, split_job
from peagle_train.errors import PeagleError
from peagle_train.run import Run
from peagle_train.store import AnswerStore, StateStore
from peagle_train.twin.models import tiny_llama
from tests.data_prep.inline import InlineJobs

RECIPE = """
name: tiny
output: {folder}/runs
target: {{model: {folder}/target, dtype: float32, device: cpu}}
data:
  train: {{source: {folder}/train.jsonl}}
  validation: {{source: {folder}/validation.jsonl}}
  heldout: {{mine: {{source: {folder}/mine.jsonl}}}}
  max_new_tokens: 60
  batch_size: 2
  workers: 2
head: {{layers: 1, aux_layers: [0, 2, 4], mask_token: <repo_name>}}
train: {{steps: 1}}
"""


def quiet() -> Console:
    return Console(file=io.StringIO())


def job(target: Path, folder: Path, batches: int = 2) -> Job:
    prompts = {batch: [Rendered(batch, "train", "a", "a", [1, 40, 41])] for batch in range(batches)}
    return Job("answer", str(target), "float32", "cpu", False, 1, None, str(folder), "f1", 4, prompts=prompts)


@pytest.mark.processes
def test_after_a_sigkill_at_most_the_unsealed_batches_are_redone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tiny_llama(tmp_path / "target")
    for name, count in (("train", 20), ("validation", 2), ("mine", 2)):
        rows = [{"prompt": f"{name} {number}"} for number in range(count)]
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    recipe = tmp_path / "tiny.yaml"
    recipe.write_text(RECIPE.format(folder=tmp_path))
    answers, states = tmp_path / "runs/tiny/answers", tmp_path / "runs/tiny/states"
    parent = subprocess.Popen(
        [sys.executable, "-c", "from peagle_train.cli import main; main()", "prepare", str(recipe)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        cwd=Path(__file__).parents[2],
    )
    deadline = time.monotonic() + 120
    while not list(answers.glob("batch-*.jsonl")):
        assert parent.poll() is None, parent.communicate()[1].decode()
        assert time.monotonic() < deadline
        time.sleep(0.005)
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    # The workers see that their parent is gone and end as well.
    count = -1
    while count != (count := len(list(answers.iterdir()))):
        time.sleep(1.5)
    sealed = {path.name: path.stat().st_mtime_ns for path in answers.glob("batch-*.jsonl")}
    assert 0 < len(sealed) < 12
    assert {path.stem for path in states.glob("*.json")} >= {Path(name).stem for name in sealed}
    assert not (answers / "index.json").exists()

    monkeypatch.setattr(prepare_stage, "run_jobs", jobs := InlineJobs())
    with Run.open(recipe, command=["test"]) as run:
        result = prepare(run, console := quiet())
    assert not result.skipped and len(jobs.batches) == 12 - len(sealed)
    assert f"{len(sealed)} of 12 batches are there already" in console.file.getvalue()  # type: ignore[attr-defined]
    assert {name: (answers / name).stat().st_mtime_ns for name in sealed} == sealed
    store = AnswerStore(answers)
    assert [row.row for row in store.rows()] == list(range(24))
    StateStore(states).verify()
    with Run.open(recipe, ["name=whole"], command=["test"]) as run:
        prepare(run, quiet())
    assert AnswerStore(tmp_path / "runs/whole/answers").batches() == store.batches()


@pytest.mark.processes
def test_a_dying_worker_is_named_with_its_batch_and_last_lines(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    broken = job(target, tmp_path)
    broken.prompts[1] = [Rendered(1, "train", "b", "b", [1, 10**9])]  # no such token
    with pytest.raises(PeagleError, match=r"worker 0 ended with status 1 in batch 1") as caught:
        run_jobs(split_job(broken, 1), title="t", budget=8, log_dir=tmp_path, console=quiet())
    assert "Traceback" in str(caught.value) or "Error" in str(caught.value)
    assert "worker-0.log" in str(caught.value)
    assert (tmp_path / "batch-00000.jsonl").exists() and not (tmp_path / "batch-00001.jsonl").exists()


@pytest.mark.processes
def test_a_fault_is_reported_as_it_stands(tmp_path: Path) -> None:
    target = tiny_llama(tmp_path / "target")
    config = json.loads((target / "config.json").read_text())
    (target / "config.json").write_text(json.dumps({**config, "architectures": ["FooForCausalLM"]}))
    with pytest.raises(PeagleError, match="FooForCausalLM: not supported"):
        run_jobs(
            split_job(job(target, tmp_path, 1), 1), title="t", budget=8, log_dir=tmp_path, console=quiet()
        )
