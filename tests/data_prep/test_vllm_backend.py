"""states.backend vllm without a vLLM: our side of it, and runner.py before a fake (fake_vllm/vllm.py).

tests/vllm/test_states.py holds the real one against transformers.
"""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console

from data_prep import extract as extract_stage
from data_prep import prepare as prepare_stage
from data_prep.extract import extract
from data_prep.jobs import Job, StatesPlan, VllmPlan
from data_prep.plan import extract_parts
from data_prep.prepare import prepare
from data_prep.vllm_states.backend import VllmStates, _environment, engine_settings
from data_prep.vllm_states.jobs import find_python, vllm_jobs
from peagle_train.errors import PeagleError
from peagle_train.files import fingerprint
from peagle_train.run import Run
from peagle_train.store import AnswerStore, StateStore
from tests.data_prep.inline import InlineJobs
from tests.tiny_run import tiny_recipe

FAKE = Path(__file__).parent / "fake_vllm"
ON_VLLM = ["states.backend=vllm", "data.batch_size=4"]


@pytest.fixture
def jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> InlineJobs:
    """An interpreter that has the fake, and workers' jobs done in this process."""
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nPYTHONPATH="{FAKE}" exec "{sys.executable}" "$@"\n')
    python.chmod(0o755)
    monkeypatch.setenv("VLLM_PYTHON", str(python))
    made = InlineJobs()
    monkeypatch.setattr(prepare_stage, "run_jobs", made)
    monkeypatch.setattr(extract_stage, "run_jobs", made)
    return made


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return tiny_recipe(tmp_path, "tiny", heldout=4, train={})


def open_run(recipe: Path, *overrides: str) -> Run:
    return Run.open(recipe, [*ON_VLLM, *overrides], command=["test"])


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def a_job(run: Run) -> Job:
    """What `extract` would hand to workers."""
    plan = StatesPlan(str(run.states_dir), "f", [1, 2, 3], 64, "float32")
    batches = AnswerStore(run.answers_dir).batches()
    return Job("extract", "t", "float32", "cpu", False, 1, plan, answered=dict(enumerate(batches)))


def hidden_files(run: Run) -> list[str]:
    return [path.name for path in run.states_dir.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize("url", [None, "far"])
def test_the_store_holds_what_vllm_gave(recipe: Path, jobs: InlineJobs, url: str | None) -> None:
    keys = [] if url is None else [f"states.url=file://{recipe.parent / url}"]
    with open_run(recipe, *keys) as run:
        prepare(run, quiet())
        assert not run.states_dir.exists()  # the answering pass keeps none
        jobs.batches.clear()
        result = extract(run, quiet())
        assert "states of 16 rows" in result.message and jobs.batches == [0, 1, 2, 3]
        store, answers = StateStore(run.states_dir), AnswerStore(run.answers_dir)
        assert not hidden_files(run) and extract(run, quiet()).skipped
        assert bool(list(run.states_dir.glob("batch-?????.safetensors"))) == (url is None)
    rows = list(answers.rows())
    assert len(store) == len(rows) == 16
    for row in rows:
        kept = store.read(row.row)
        assert kept.token_ids.tolist() == row.token_ids and kept.loss_mask.tolist() == row.loss_mask
        tokens = torch.tensor(row.token_ids[:-1])
        expected = [(tokens + layer / 100)[:, None].expand(-1, 64) for layer in (1, 2, 3, 4)]
        torch.testing.assert_close(kept.aux, torch.cat(expected[:3], dim=-1)[: len(kept.aux)])
        torch.testing.assert_close(kept.last, expected[3][kept.last_at])


def test_after_a_death_the_same_command_goes_on(
    recipe: Path, jobs: InlineJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(recipe) as run:
        prepare(run, quiet())
    monkeypatch.setenv("FAKE_VLLM", "dies at 2")
    with open_run(recipe) as run, pytest.raises(PeagleError) as caught:
        extract(run, quiet())
    message = str(caught.value)
    assert "vLLM ended by signal 9 in batch" in message and "too little memory" in message
    assert "  | the fake vLLM dies" in message and "vllm-0.log" in message
    sealed = {path.name: path.stat().st_mtime_ns for path in run.states_dir.glob("batch-*.json")}
    assert 0 < len(sealed) < 4 and not hidden_files(run)
    monkeypatch.delenv("FAKE_VLLM")
    jobs.batches.clear()
    with open_run(recipe) as run:
        extract(run, quiet())
        assert len(jobs.batches) == 4 - len(sealed)
        assert {name: (run.states_dir / name).stat().st_mtime_ns for name in sealed} == sealed
        StateStore(run.states_dir).verify()


def test_what_a_killed_extraction_left_is_cleared_away(recipe: Path, jobs: InlineJobs) -> None:
    with open_run(recipe) as run:
        prepare(run, quiet())
        left = run.states_dir / ".vllm-0.4711.partial" / "0-0-0a1b.safetensors"
        left.parent.mkdir(parents=True)
        left.write_bytes(b"x")
        extract(run, quiet())
        assert not hidden_files(run)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        (
            "broken",
            r"vLLM ended with status 1 while loading the target(.|\n)*ValueError: the fake vLLM does not",
        ),
        ("garbles", r"of other tokens than were sent(.|\n)*found 0.32.0"),
        ("cuda", r"target.device is cpu, but the vLLM of .* runs on cuda"),
    ],
)
def test_a_fault_of_vllm_is_told(
    recipe: Path, jobs: InlineJobs, monkeypatch: pytest.MonkeyPatch, fault: str, message: str
) -> None:
    with open_run(recipe) as run:
        prepare(run, quiet())
    monkeypatch.setenv("FAKE_VLLM", fault)
    with open_run(recipe) as run, pytest.raises(PeagleError, match=message):
        extract(run, quiet())
    assert not hidden_files(run) and not list(run.states_dir.glob("batch-*.json"))


def test_an_interpreter_without_vllm_is_named(
    recipe: Path, jobs: InlineJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(recipe) as run:
        prepare(run, quiet())
    monkeypatch.setenv("VLLM_PYTHON", sys.executable)
    with open_run(recipe) as run, pytest.raises(PeagleError, match=r"has no vLLM .*VLLM_PYTHON"):
        extract(run, quiet())


def test_a_missing_interpreter_costs_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_PYTHON", str(tmp_path / "nowhere"))
    with pytest.raises(PeagleError, match=r"no interpreter at .*nowhere; .*VLLM_PYTHON=.*states.backend=hf"):
        find_python()
    monkeypatch.delenv("VLLM_PYTHON")
    monkeypatch.chdir(tmp_path)
    place = tmp_path / ".venv-vllm" / "bin" / "python"
    place.parent.mkdir(parents=True)
    place.symlink_to(sys.executable)
    assert find_python() == place  # the link itself: what it points to has other packages


def test_the_engine_ends_with_its_parent(recipe: Path, jobs: InlineJobs, tmp_path: Path) -> None:
    """Killed in the middle: the runner sees it, ends, and takes its files with it."""
    job, scratch = tmp_path / "job.json", tmp_path / "scratch"
    kept = StatesPlan(str(tmp_path), "f", [1], 64, "float32")
    plan = VllmPlan(os.environ["VLLM_PYTHON"], str(tmp_path / "vllm.log"), 4, 8, 64)
    target = str(tmp_path / "target")
    job.write_text(Job("extract", target, "float32", "cpu", False, 1, kept, vllm=plan).to_json())
    program = (
        "import sys, time; from pathlib import Path; from data_prep.jobs import Job;"
        "from data_prep.vllm_states.backend import VllmStates;"
        f"job = Job.from_json(Path({str(job)!r}).read_text());"
        f"engine = VllmStates(job.vllm, Path({str(scratch)!r})).__enter__(); engine.start(job);"
        "print(engine._process.pid, flush=True); time.sleep(600)"
    )
    environment = dict(os.environ, PYTHONPATH=str(Path(__file__).parents[2]))
    parent = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, env=environment)
    assert parent.stdout is not None
    runner = int(parent.stdout.readline())
    assert scratch.is_dir()
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    deadline = time.monotonic() + 20
    while _runs(runner) or scratch.exists():
        assert time.monotonic() < deadline, "the runner outlives its parent"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Whether a process is there and no zombie that waits for init."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_second_target_takes_the_first_ones_place(jobs: InlineJobs, tmp_path: Path) -> None:
    for name, hidden in (("a", 4), ("b", 6)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps({"hidden_size": hidden}))
    plan = VllmPlan(os.environ["VLLM_PYTHON"], str(tmp_path / "vllm.log"), 4, 8, 64)
    kept = StatesPlan("", "", [3, 0], 4, "float32")
    with VllmStates(plan, tmp_path / "scratch") as vllm:
        for name, hidden in (("a", 4), ("b", 6)):
            vllm.start(Job("extract", str(tmp_path / name), "float32", "auto", False, 1, kept, vllm=plan))
            counted: list[int] = []
            rows = [(0, [[7, 8, 9], [5, 6]]), (1, [[1, 2]]), (2, [[3, 4]])]
            given = dict(vllm.states(rows, counted.append))
            aux, last = given[0][0]
            assert aux.shape == (2, 2 * hidden) and last.shape == (2, hidden)
            torch.testing.assert_close(aux[:, [0, hidden]], torch.tensor([[7.03, 7.0], [8.03, 8.0]]))
            torch.testing.assert_close(last[:, 0], torch.tensor([7.04, 8.04]))
            assert sorted(counted) == [2, 2, 2, 3] and list(given) == [0, 1, 2]


def test_every_gpu_has_an_engine_or_one_engine_has_them_all(
    recipe: Path, jobs: InlineJobs, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_run(recipe, "data.workers=1") as run:
        prepare(run, quiet())
        job = a_job(run)
        assert [(made.vllm.gpu, made.threads) for made in vllm_jobs(job, run) if made.vllm] == [(None, 1)]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    on_gpu = replace(job, device="auto")
    with open_run(recipe, "data.workers=") as run:
        shares = vllm_jobs(on_gpu, run)
        assert [made.vllm.gpu for made in shares if made.vllm] == [0, 1, 2]
        assert [sorted(made.answered) for made in shares] == [[0, 3], [1], [2]]
        assert len({made.vllm.log for made in shares if made.vllm}) == 3
        assert [made.vllm.gpu for made in vllm_jobs(replace(job, device="cuda:2"), run) if made.vllm] == [2]
    with open_run(recipe, "data.workers=2") as run:
        assert [made.vllm.gpu for made in vllm_jobs(on_gpu, run) if made.vllm] == [0, 1]
    server = "data.server={url: http://127.0.0.1:9/v1}"
    with open_run(recipe, "target.parallel=tensor", server) as run:
        (whole,) = vllm_jobs(on_gpu, run)
    assert whole.vllm is not None and whole.vllm.all_gpus and whole.vllm.gpu is None
    assert sorted(whole.answered) == [0, 1, 2, 3]
    assert Job.from_json(whole.to_json()) == whole


def test_the_gpu_is_one_of_those_that_are_visible(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,6")
    assert _environment(1)["CUDA_VISIBLE_DEVICES"] == "6"
    assert _environment(None)["CUDA_VISIBLE_DEVICES"] == "4,6"
    assert "PYTHONPATH" not in _environment(1)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert _environment(1)["CUDA_VISIBLE_DEVICES"] == "1"
    assert "CUDA_VISIBLE_DEVICES" not in _environment(None)


def test_a_row_beyond_the_context_is_refused_before_anything_is_loaded(
    recipe: Path, jobs: InlineJobs
) -> None:
    with open_run(recipe) as run:
        prepare(run, quiet())
        job = a_job(run)
        row = job.answered[1][2]
        job.answered[1][2] = replace(row, token_ids=[5] * 513, spans=[[2, 513]])
        with pytest.raises(PeagleError, match=rf"row {row.row} .* has 513 tokens; .* 512"):
            vllm_jobs(job, run)


def test_no_token_is_taken_from_a_prefix_cache_and_no_path_from_a_request(tmp_path: Path) -> None:
    plan = VllmPlan("", "", 4, 30, 16)
    kept = StatesPlan("", "", [1], 64, "float32")
    job = Job("extract", "target", "float32", "cpu", False, 1, kept, vllm=plan)
    settings = engine_settings(job, plan, [1, 4], tmp_path)
    assert settings["enable_prefix_caching"] is False
    assert settings["kv_transfer_config"]["kv_connector_extra_config"] == {"folder": str(tmp_path)}
    assert settings["max_num_batched_tokens"] == 16 and settings["max_model_len"] == 30


def test_stores_of_transformers_keep_their_fingerprint(recipe: Path) -> None:
    with Run.open(recipe, command=["test"]) as run:
        own = extract_parts(run, "p")
    with open_run(recipe) as run:
        served = extract_parts(run, "p")
    assert "states.backend" not in own and served == {**own, "states.backend": "vllm"}
    assert fingerprint(own) != fingerprint(served)
