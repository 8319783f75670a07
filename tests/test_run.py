"""What opening a run checks, writes and locks."""

from __future__ import annotations

import gc
import json
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest

from peagle_train.errors import PeagleError, RecipeError
from peagle_train.files import read_json
from peagle_train.lock import FolderLock
from peagle_train.recipe import load_recipe
from peagle_train.run import Run
from tests.recipe.test_load import GOOD

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}


@pytest.fixture
def recipe_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("target").mkdir()
    Path("target/config.json").write_text(json.dumps(CONFIG))
    path = Path("tiny.yaml")
    path.write_text(GOOD.replace("some/model", "./target"))
    return path


def test_opening_keeps_recipe_versions_and_command(recipe_file: Path) -> None:
    with Run.open(recipe_file, ["train.steps=7"], ["peagle", "run", "tiny.yaml", "train.steps=7"]) as run:
        assert run.facts.num_layers == 4
        assert run.directory == Path("runs/tiny")
        assert (run.answers_dir, run.states_dir) == (Path("runs/tiny/answers"), Path("runs/tiny/states"))
        assert (run.training_dir, run.head_dir) == (Path("runs/tiny/training"), Path("runs/tiny/head"))
        assert (run.evaluation_dir, run.summary_path) == (
            Path("runs/tiny/evaluation"),
            Path("runs/tiny/summary.json"),
        )
        assert load_recipe(run.directory / "recipe.resolved.yaml") == run.recipe
        record = read_json(run.directory / "run.json")
        assert record["commands"][0]["command"] == "peagle run tiny.yaml train.steps=7"
        assert record["versions"]["torch"]
        assert run.command_for("train") == "peagle train tiny.yaml train.steps=7"


def test_every_command_is_kept_and_so_is_a_recipe_that_changed(recipe_file: Path) -> None:
    for steps in (7, 7, 8):
        Run.open(recipe_file, [f"train.steps={steps}"], ["peagle", str(steps)]).close()
    folder = Path("runs/tiny")
    commands = read_json(folder / "run.json")["commands"]
    assert [command["command"] for command in commands] == ["peagle 7", "peagle 7", "peagle 8"]
    assert commands[0]["resolved_recipe"] == commands[1]["resolved_recipe"] != commands[2]["resolved_recipe"]
    old = list(folder.glob("recipe.resolved.old-*.yaml"))
    assert len(old) == 1
    assert load_recipe(old[0]).train.steps == 7
    assert load_recipe(folder / "recipe.resolved.yaml").train.steps == 8


def test_what_the_target_refuses_is_refused_before_anything_is_written(recipe_file: Path) -> None:
    with pytest.raises(RecipeError, match=r"command line: head\.aux_layers: found 9; expected at most 4"):
        Run.open(recipe_file, ["head.aux_layers=[1,9]"])
    assert not Path("runs").exists()


def test_other_ranks_write_and_lock_nothing(recipe_file: Path) -> None:
    with Run.open(recipe_file, write=False):
        assert not Path("runs").exists()
    with Run.open(recipe_file):
        before = Path("runs/tiny/run.json").read_text()
        with Run.open(recipe_file, write=False) as rank:
            assert rank.lock is None
        assert Path("runs/tiny/run.json").read_text() == before


TRY = """
import sys
from pathlib import Path
from peagle_train.errors import PeagleError
from peagle_train.lock import FolderLock
try:
    lock = FolderLock(Path(sys.argv[1]))
except PeagleError as error:
    sys.exit(f"refused: {error}")
print("locked", flush=True)
sys.stdin.read()
"""


def another_process(folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", TRY, str(folder)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def test_two_processes_do_not_share_a_folder(tmp_path: Path) -> None:
    other = another_process(tmp_path)
    try:
        assert other.stdout is not None
        assert other.stdout.readline() == "locked\n"
        with pytest.raises(PeagleError, match=rf"found another process at work here \(process {other.pid}\)"):
            FolderLock(tmp_path)
    finally:
        other.kill()  # however it dies, the lock is gone with it
        other.communicate()
    FolderLock(tmp_path).release()


def test_a_lock_is_held_until_its_last_user_lets_go(tmp_path: Path) -> None:
    def refused() -> bool:
        _, said = another_process(tmp_path).communicate("")
        return "refused" in said

    first, second = FolderLock(tmp_path), FolderLock(tmp_path)  # one process may lock again
    first.release()
    first.release()
    assert refused()
    second.release()
    assert not refused()
    forgotten = FolderLock(tmp_path)
    assert refused()
    del forgotten
    gc.collect()
    assert not refused()


def test_a_forked_worker_does_not_keep_the_lock(tmp_path: Path) -> None:
    lock = FolderLock(tmp_path)
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    worker = context.Process(target=stop.wait, args=(60,))
    worker.start()
    try:
        lock.release()
        _, said = another_process(tmp_path).communicate("")
        assert "refused" not in said
    finally:
        stop.set()
        worker.join()
