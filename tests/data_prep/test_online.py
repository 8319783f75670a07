"""States made beside a training: equal to stored ones, the same after a stop, within their cap."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from data_prep.bounded import GB, BoundedStates, open_bounded
from data_prep.making import AnsweredRows, Maker, cut
from data_prep.online import OnlineStates, device_of, open_online
from peagle_train import Run
from peagle_train.errors import PeagleError
from peagle_train.pipeline import run_stage
from peagle_train.recipe.schema import TargetSection
from peagle_train.store import AnswerStore, StateStore
from peagle_train.store.rows import cut_row
from peagle_train.store.source import StatesSource
from tests.tiny_run import tiny_recipe
from tests.training.runs import everything

QUIET = Console(quiet=True)
MODES = [
    pytest.param(["online"], id="online"),
    pytest.param(["bounded", "states.cap=0.0002"], id="bounded", marks=pytest.mark.slow),
]
SAME = 1e-4  # batches of other company round otherwise


def open_run(recipe: Path, name: str, *overrides: str) -> Run:
    return Run.open(recipe, [f"name={name}", *overrides], command=("peagle", "train"))


def road(recipe: Path, name: str, *overrides: str, stages: tuple[str, ...] = ("extract", "train")) -> Path:
    """Runs stages under a name of its own on the answers of `base`."""
    runs = recipe.parent / "runs"
    (runs / name).mkdir(exist_ok=True)
    if not (runs / name / "answers").exists():
        (runs / name / "answers").symlink_to(Path("..") / "base" / "answers")
    with open_run(recipe, name, *overrides) as run:
        for stage in stages:
            run_stage(run, stage, QUIET)
        return run.training_dir


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Answered and stored once, as `base`."""
    folder = tmp_path_factory.mktemp("online")
    path = tiny_recipe(
        folder, "base", heldout=2, train={"steps": 6, "validate_every": 3, "checkpoint_every": 2}
    )
    with open_run(path, "base") as run:
        for stage in ("prepare", "extract", "train"):
            run_stage(run, stage, QUIET)
    return path


@pytest.fixture(params=["online", "bounded"])
def source(request: pytest.FixtureRequest, recipe: Path) -> Iterator[StatesSource]:
    cap = ["states.cap=0.001"] if request.param == "bounded" else []
    with open_run(recipe, "base", f"states.mode={request.param}", *cap) as run:
        opened: Any = (open_bounded if cap else open_online)(run, "f", QUIET)
    yield opened
    opened.close()


def stored(recipe: Path) -> StateStore:
    return StateStore(recipe.parent / "runs" / "base" / "states")


@pytest.mark.processes
def test_they_are_the_stored_states(source: StatesSource, recipe: Path) -> None:
    store = stored(recipe)
    rows = [info.row for info in store.info()]
    assert [info.row for info in source.info()] == rows and len(source) == len(store)
    source.upcoming(rows[:5])
    for row in [*rows[4::-1], *rows[5:], rows[0]]:  # announced in another order, not announced, once more
        ours, theirs = source.read(row), store.read(row)
        assert ours.token_ids.equal(theirs.token_ids) and ours.loss_mask.equal(theirs.loss_mask)
        assert source.token_ids(row).equal(theirs.token_ids) and source.loss_mask(row).equal(theirs.loss_mask)
        assert (ours.set, ours.id, ours.prompt_length) == (theirs.set, theirs.id, theirs.prompt_length)
        assert (source.aux_layers, source.dtype) == (store.aux_layers, store.dtype)
        for name in ("aux", "last"):
            torch.testing.assert_close(
                getattr(cut_row(ours), name), getattr(theirs, name), rtol=SAME, atol=SAME
            )


@pytest.mark.processes
def test_unknown_rows_and_sets_are_named(source: StatesSource) -> None:
    with pytest.raises(PeagleError, match="no row 999"):
        source.read(999)
    with pytest.raises(PeagleError, match=r"no set 'x'; it holds sums, train, validation"):
        source.info("x")


def losses(training: Path) -> list[float]:
    lines = (training / "log.jsonl").read_text().splitlines()
    return [json.loads(line)["loss"] for line in lines if "loss" in line]


@pytest.mark.processes
@pytest.mark.parametrize("mode", MODES)
def test_a_training_learns_what_it_learns_from_stored_states(recipe: Path, mode: list[str]) -> None:
    keys = ["train.log_every=1", f"states.mode={mode[0]}", *mode[1:]]
    training = road(recipe, f"{mode[0]}-learns", *keys)
    ours = losses(training)
    assert len(ours) == 6
    reference = losses(road(recipe, "stored", "train.log_every=1"))
    torch.testing.assert_close(torch.tensor(ours), torch.tensor(reference), rtol=1e-4, atol=1e-4)
    assert not list(training.parent.glob(".bounded*"))
    assert sorted(file.name for file in (training.parent / "states").iterdir()) == ["stage.json"]
    with open_run(recipe, f"{mode[0]}-learns", *keys) as run:  # and so does an evaluation
        run_stage(run, "export", QUIET)
        assert "acceptance length" in run_stage(run, "evaluate", QUIET).message


@pytest.mark.processes
@pytest.mark.parametrize("mode", MODES)
def test_killed_and_gone_on_it_ends_with_the_same_bits(recipe: Path, mode: list[str]) -> None:
    keys = [f"states.mode={mode[0]}", *mode[1:]]
    whole = road(recipe, f"{mode[0]}-whole", *keys)
    pid = os.fork()
    if pid == 0:
        import peagle_train.training.loop as loop

        step = loop.Loop._step

        def killed(self: loop.Loop, number: int) -> dict[str, Any]:
            if number == 5:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, number)

        loop.Loop._step = killed  # type: ignore[method-assign]
        road(recipe, f"{mode[0]}-killed", *keys)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    again = road(recipe, f"{mode[0]}-killed", *keys)
    ours, theirs = everything(again), everything(whole)
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        same = torch.equal(value, theirs[name]) if isinstance(value, torch.Tensor) else value == theirs[name]
        assert same, name


def bounded(recipe: Path, cap: float) -> BoundedStates:
    with open_run(recipe, "base", "states.mode=bounded", f"states.cap={cap}") as run:
        return open_bounded(run, "f", QUIET)


@pytest.mark.processes
def test_within_the_cap_the_producer_works_ahead_and_damage_is_noticed(recipe: Path) -> None:
    cap = 0.0002
    states = bounded(recipe, cap)

    def lying() -> list[Path]:
        return [file for file in states._directory.glob("*.safetensors") if not file.name.startswith(".")]

    try:
        rows = [info.row for info in states.info("train")]
        assert sum(states._bytes([row]) for row in rows) > cap * GB, "the test needs more than the cap"
        for row in rows:  # each a step of its own
            states.upcoming([row])
        with states._changed:  # as many files as have room, before any is asked for
            assert states._changed.wait_for(lambda: len(lying()) == len(states._batches), timeout=60)
        assert len(lying()) > 1 and states._queue
        for row in rows[:-1]:
            states.read(row)
            assert sum(file.stat().st_size for file in lying()) <= cap * GB
            assert sum(batch.bytes for batch in states._batches) <= cap * GB
        with states._changed:
            assert states._changed.wait_for(lambda: len(lying()) == 1, timeout=60)
        (last,) = lying()
        data = bytearray(last.read_bytes())
        data[-1] ^= 1
        last.write_bytes(data)
        with pytest.raises(PeagleError, match="differs from its checksum"):
            states.read(rows[-1])
    finally:
        states.close()
    assert not states._directory.exists()


def test_a_cap_that_no_row_fits_is_refused(recipe: Path) -> None:
    with pytest.raises(PeagleError, match=r"states\.cap: found 1e-06 GB; expected at least .* longest row"):
        bounded(recipe, 1e-6)


def test_a_producer_that_dies_is_told_with_its_last_words(recipe: Path) -> None:
    states = bounded(recipe, 0.001)
    try:
        states._process.kill()
        with pytest.raises(PeagleError, match="the producer of states ended by signal 9"):
            states.read(0)
    finally:
        states.close()


@pytest.mark.processes
def test_a_fault_of_the_producer_is_told_as_it_stands(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("data_prep.bounded.obtain", lambda section, console: recipe.parent / "nowhere")
    states = bounded(recipe, 0.001)
    try:
        with pytest.raises((PeagleError), match="nowhere"):
            states.read(0)
    finally:
        states.close()


def test_micro_batches_are_cut_by_tokens(recipe: Path) -> None:
    rows = AnsweredRows(AnswerStore(recipe.parent / "runs" / "base" / "answers"))
    all_of_them = [info.row for info in rows.info()]
    for budget in (1, 60, 200, 10_000):
        batches = cut(rows, all_of_them, budget)
        assert sorted(row for batch in batches for row in batch) == all_of_them
        for batch in batches:
            width = max(rows.info_of(row).tokens for row in batch)
            assert width * len(batch) <= budget or len(batch) == 1
    assert len(cut(rows, all_of_them, 10_000)) == 1 and len(cut(rows, all_of_them, 1)) == len(all_of_them)


def test_with_a_thread_it_makes_the_same(recipe: Path) -> None:
    with open_run(recipe, "base", "states.mode=online") as run:
        plain = open_online(run, "f", QUIET)
    maker: Maker = plain._maker
    ahead = OnlineStates(maker, 64, "f", ahead=2)
    rows = [info.row for info in plain.info("train")]
    try:
        plain._budget = 64
        plain.upcoming(rows)
        wanted = {row: plain.read(row).aux for row in rows}  # first: they share one target
        ahead.upcoming(rows)
        assert sum(batch.made is not None for batch in ahead._queue) == 2 < len(ahead._queue)
        assert torch.equal(ahead.read(rows[-1]).aux, wanted[rows[-1]])
        for row in rows[:-1]:
            assert torch.equal(ahead.read(row).aux, wanted[row])
    finally:
        ahead.close()


@pytest.mark.parametrize(
    ("named", "rank", "found"),
    [("cuda", "1", "cuda:1"), ("cuda:4", "0", "cuda:4"), ("cuda:4", "3", "cuda:7"), ("cpu", "3", "cpu")],
)
def test_each_process_has_its_device(
    named: str, rank: str, found: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("LOCAL_RANK", rank)
    assert device_of(TargetSection(model="x", device=named)) == found
