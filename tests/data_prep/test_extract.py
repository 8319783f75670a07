"""The second pass: the same states however rows are cut, on any number of processes, after any kill."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
import torch
from rich.console import Console

from data_prep.jobs import Job
from data_prep.ranks import shares
from data_prep.teacher_forcing import cut, forced_states
from data_prep.workers import split_job
from peagle_train import Run
from peagle_train.errors import RecipeError
from peagle_train.pipeline import run_stage
from peagle_train.store import StateStore
from peagle_train.target.adapter import Target
from peagle_train.twin.models import TWINS
from tests.tiny_run import tiny_recipe

LENGTHS = (3, 40, 17, 17, 29, 5)  # some longer than the windows of the sliding twins, which are 8
NEAR = 1e-4  # of the largest state: batches of other sizes round otherwise


@pytest.fixture(scope="module", params=TWINS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = TWINS[request.param](tmp_path_factory.mktemp("twin"))
    return Target.load(folder, dtype="float32", device="cpu")


def rows_of(target: Target, lengths: tuple[int, ...] = LENGTHS) -> list[list[int]]:
    generator = torch.Generator().manual_seed(0)
    common = torch.randint(5, 200, (4,), generator=generator).tolist()  # a system turn, say
    return [
        [*common[: n - 1], *torch.randint(5, 200, (n - min(4, n - 1),), generator=generator).tolist()]
        for n in lengths
    ]


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape and ours.dtype == theirs.dtype
    assert float((ours - theirs).abs().max()) <= NEAR * float(theirs.abs().max())


@pytest.mark.parametrize("batch_tokens", [None, 1, 45, 80])
def test_rows_have_their_states_however_they_are_cut(target: Target, batch_tokens: int | None) -> None:
    """Against transformers' own forward of each row alone; ids 0..L, the last before the final norm."""
    depth, rows = target.facts.num_layers, rows_of(target)
    layers = list(range(depth + 1))
    found = forced_states(target, rows, layers, torch.float32, batch_tokens)
    hidden = target.facts.hidden_size
    for row, (aux, last) in zip(rows, found, strict=True):
        with torch.no_grad():
            own = target.model(torch.tensor([row[:-1]]), output_hidden_states=True, use_cache=False)
        assert aux.shape == (len(row) - 1, (depth + 1) * hidden)
        for layer in range(depth):
            assert_near(aux[:, layer * hidden : (layer + 1) * hidden], own.hidden_states[layer][0])
        assert torch.equal(aux[:, depth * hidden :], last)
        assert_near(target.normed(last), own.hidden_states[depth][0])
        assert not torch.allclose(last, own.hidden_states[depth][0], atol=1e-2), "that one is normed"


@pytest.mark.parametrize("budget", [1, 20, 45, 80, 10_000])
def test_passes_stay_within_their_budget(budget: int) -> None:
    batches = cut(LENGTHS, budget)
    assert sorted(index for batch in batches for index in batch) == list(range(len(LENGTHS)))
    for batch in batches:
        widths = [LENGTHS[index] for index in batch]
        assert len(batch) == 1 or max(widths) * len(batch) <= budget
    assert [max(LENGTHS[i] for i in batch) for batch in batches] == sorted(
        (max(LENGTHS[i] for i in batch) for batch in batches), reverse=True
    )


def test_shares_are_balanced_and_whole() -> None:
    tokens = {batch: 100 + 37 * batch % 90 for batch in range(23)}
    for world in (1, 2, 5, 30):
        found = shares(tokens, world)
        assert sorted(batch for mine in found for batch in mine) == list(tokens) and len(found) == world
        if world <= 5:
            sums = [sum(tokens[batch] for batch in mine) for mine in found]
            assert max(sums) - min(sums) <= max(tokens.values())


def test_each_gpu_has_a_worker_and_a_spread_target_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)

    def devices(device: str, parallel: str = "none", workers: int | None = None) -> list[str]:
        job = Job("answer", "x", "float32", device, False, 1, None, parallel=parallel)
        job.prompts.update({batch: [] for batch in range(5)})
        return [part.device for part in split_job(job, workers)]

    assert devices("auto") == devices("cuda") == ["cuda:0", "cuda:1", "cuda:2"]
    assert devices("cuda:2") == ["cuda:2"] and devices("auto", "layers") == ["cuda"]
    assert devices("cuda", workers=5) == ["cuda:0", "cuda:1", "cuda:2", "cuda:0", "cuda:1"]
    assert set(devices("cpu")) == {"cpu"}


def test_a_target_spread_over_devices_has_the_same_states(tmp_path: Path) -> None:
    """Layers on the disk are fetched for their turn by the same hooks as those on another GPU."""
    folder = TWINS["llama"](tmp_path / "twin")
    whole = Target.load(folder, dtype="float32", device="cpu")
    names = {name.rpartition(".")[0] for name, _ in whole.model.named_parameters()}
    names.add("lm_head")  # tied
    places = {name: "disk" if ".layers.1." in name or ".layers.2." in name else "cpu" for name in names}
    spread = Target.load(folder, dtype="float32", device="cpu", spread=places)
    assert any(parameter.device.type == "meta" for parameter in spread.model.parameters())
    rows = rows_of(whole)
    for ours, theirs in zip(
        *(forced_states(t, rows, [0, 2, 4], torch.float32) for t in (spread, whole)), strict=True
    ):
        assert torch.equal(ours[0], theirs[0]) and torch.equal(ours[1], theirs[1])


def test_splitting_matrices_is_vllms(tmp_path: Path) -> None:
    path = tiny_recipe(tmp_path, "tiny", heldout=2, train={})
    with pytest.raises(
        RecipeError, match=r"target\.parallel: found tensor without states\.backend and data\.server"
    ):
        Run.open(path, ["target.parallel=tensor"])


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with answers in eight batches, whose states are to be made."""
    path = tiny_recipe(tmp_path_factory.mktemp("ranks"), "tiny", heldout=4, train={})
    with open_run(path) as run:
        run_stage(run, "prepare", Console(quiet=True))
        run_stage(run, "extract", Console(quiet=True))
        run.states_dir.rename(run.directory / "whole")
    return path


KEYS = ["states.keep_while_answering=false", "data.batch_size=2"]


def open_run(path: Path) -> Run:
    return Run.open(path, KEYS, command=("peagle", "extract"))


def launch(path: Path, processes: int) -> subprocess.Popen[str]:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc_per_node",
        str(processes),
    ]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [*command, "-m", "data_prep.extract", str(path), *KEYS],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
    )


@pytest.fixture
def states(answered: Path) -> Iterator[Path]:
    folder = answered.parent / "runs" / "tiny" / "states"
    yield folder
    if folder.exists():
        folder.rename(folder.with_name(f"done-{time.monotonic_ns()}"))


def assert_whole(states: Path) -> None:
    """Every row as one process made it, to rounding: passes are the same, so to the last bit."""
    ours, theirs = StateStore(states), StateStore(states.with_name("whole"))
    assert len(ours) == len(theirs)
    for info in theirs.info():
        mine, whole = ours.read(info.row), theirs.read(info.row)
        assert torch.equal(mine.aux, whole.aux) and torch.equal(mine.last, whole.last)


@pytest.mark.processes
def test_two_processes_make_what_one_makes(answered: Path, states: Path) -> None:
    process = launch(answered, 2)
    out, _ = process.communicate(timeout=240)
    assert process.returncode == 0, out
    assert "on 2 processes" in out and "Next: peagle train" in out
    assert_whole(states)


@pytest.mark.slow
def test_killed_on_two_and_gone_on_by_one(answered: Path, states: Path) -> None:
    process = launch(answered, 2)
    while len(list(states.glob("batch-*.json"))) < 2:
        assert process.poll() is None, process.communicate()[0]
        time.sleep(0.01)
    everyone = [*psutil.Process(process.pid).children(recursive=True), psutil.Process(process.pid)]
    for one in everyone:
        one.kill()
    psutil.wait_procs(everyone)
    before = {file.name: file.stat().st_mtime_ns for file in states.glob("batch-*.json")}
    with open_run(answered) as run:
        run_stage(run, "extract", Console(quiet=True))
    after = {file.name: file.stat().st_mtime_ns for file in states.glob("batch-*.json")}
    assert len(after) == 8 and all(after[name] == written for name, written in before.items())
    assert_whole(states)


@pytest.mark.slow
def test_a_fault_of_one_process_ends_all_with_its_words(answered: Path, tmp_path: Path) -> None:
    process = launch(tmp_path / "none.yaml", 2)
    out, _ = process.communicate(timeout=240)
    assert process.returncode != 0 and "found no such recipe" in out
