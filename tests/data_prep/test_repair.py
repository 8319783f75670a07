"""`peagle extract RECIPE --repair`, and states at a URL through the stages."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from data_prep import extract as extract_stage
from data_prep import prepare as prepare_stage
from data_prep.extract import extract
from data_prep.prepare import prepare
from data_prep.repair import repair
from peagle_train.cli import app
from peagle_train.errors import CorruptError, PeagleError
from peagle_train.run import Run
from peagle_train.stages import StageResult, read_record, require
from peagle_train.store import StateStore
from tests.data_prep.test_stages import Bench
from tests.store.rows import harm


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path)
    monkeypatch.setattr(prepare_stage, "run_jobs", made.jobs)
    monkeypatch.setattr(extract_stage, "run_jobs", made.jobs)
    return made


def mended(run: Run, console: Console) -> StageResult:
    """As the command does."""
    repair(run, console)
    return extract(run, console)


def truncate(states: Path) -> None:
    path = states / "batch-00001.safetensors"
    path.write_bytes(path.read_bytes()[:-9])


def break_index(states: Path) -> None:
    (states / "index.json").write_text("{")


def remove_index(states: Path) -> None:
    (states / "index.json").unlink()


HARM: dict[str, tuple[Callable[[Path], Any], list[int]]] = {
    "a changed byte": (lambda states: harm(states / "batch-00001.safetensors"), [1]),
    "cut short": (truncate, [1]),
    "a sidecar gone": (lambda states: (states / "batch-00002.json").unlink(), [2]),
    "index broken": (break_index, []),
    "index gone": (remove_index, []),
}


@pytest.mark.parametrize("what", HARM)
def test_exactly_what_is_damaged_is_made_anew(bench: Bench, what: str) -> None:
    bench(prepare)
    before = {path.name: path.read_bytes() for path in bench.states.glob("batch-*")}
    do, batches = HARM[what]
    do(bench.states)
    result = bench(mended)
    assert not result.skipped and bench.jobs.batches == batches
    StateStore(bench.states).verify()
    # What stayed is the same to the last byte: nothing of it was made or written again.
    kept = [name for name in before if int(name[6:11]) not in batches]
    assert all((bench.states / name).read_bytes() == before[name] for name in kept)
    record = read_record(bench.states)
    assert record is not None and record.finished and set(before) <= set(record.files)
    assert bench.states.with_name("states.damaged").is_dir() == bool(batches)
    assert ("damaged: " in bench.text.getvalue()) == bool(batches)
    assert not list(bench.states.parent.glob("states.old-*"))
    assert bench(extract).skipped


def test_the_command_repairs(bench: Bench) -> None:
    bench(prepare)
    harm(bench.states / "batch-00001.safetensors")
    bench.jobs.batches.clear()
    done = CliRunner().invoke(app, ["extract", str(bench.recipe), "--repair"])
    assert done.exit_code == 0 and bench.jobs.batches == [1], done.output
    assert "Next: peagle train" in done.output


def test_sound_states_are_left_alone(bench: Bench) -> None:
    bench(prepare)
    assert bench(mended).skipped and not bench.jobs.batches
    assert "nothing is damaged" in bench.text.getvalue()


def test_an_unfinished_extraction_is_repaired_too(bench: Bench) -> None:
    bench(prepare)
    (bench.states / "index.json").unlink()
    record = json.loads((bench.states / "stage.json").read_text())
    (bench.states / "stage.json").write_text(json.dumps({**record, "finished": None, "files": {}}))
    (bench.states / "batch-00003.json").unlink()
    truncate(bench.states)
    with pytest.raises(CorruptError, match=r"batch-00001.*cut short; run `peagle extract RECIPE --repair`"):
        bench(extract)
    bench(mended)
    assert sorted(bench.jobs.batches) == [1, 3]
    StateStore(bench.states).verify()


def test_without_states_of_the_recipe_nothing_is_touched(bench: Bench) -> None:
    bench(prepare)
    before = sorted(bench.states.iterdir())
    with pytest.raises(PeagleError, match=r"no stored states of this recipe.*run `peagle extract"):
        bench(mended, "head.aux_layers=[1]")
    assert sorted(bench.states.iterdir()) == before


def test_states_at_a_url_go_through_the_stages(bench: Bench) -> None:
    keys = [f"states.url=file://{bench.folder}/far", "states.cache=0.001"]
    bench(prepare, *keys)
    assert not list(bench.states.glob("batch-0000?.safetensors"))
    assert f"at file://{bench.folder}/far: at most" in bench.text.getvalue().replace("\n", "")
    assert bench(extract, *keys).skipped
    with Run.open(bench.recipe, keys, command=["test"]) as run:
        fingerprint = require(run, "extract")
    shards = bench.folder / "far" / fingerprint
    assert len(list(shards.glob("batch-0000?.safetensors"))) == 4
    bench(prepare, "name=near")
    near, far = StateStore(bench.folder / "runs/near/states"), StateStore(bench.states, expected=fingerprint)
    assert all(near.read(info.row).aux.equal(far.read(info.row).aux) for info in near.info())
    harm(shards / "batch-00002.safetensors")
    with pytest.raises(PeagleError, match=r"states lie at file://.*, the recipe has them in its folder"):
        bench(mended)
    bench(mended, *keys)
    assert bench.jobs.batches == [2]
    StateStore(bench.states).verify()
    assert not list(bench.states.glob("batch-0000?.safetensors"))
