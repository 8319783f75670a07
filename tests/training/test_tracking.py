"""Curves in real trackers equal log.jsonl, go on after a kill, and cost no network.

Every test runs in surroundings that invite trackers out: proxies, tokens and server addresses point to a
listener that must hear nothing.
"""

from __future__ import annotations

import contextlib
import os
import pty
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml
from accelerate.tracking import TensorBoardTracker
from huggingface_hub import close_session, constants
from rich.console import Console

from peagle_train.errors import PeagleError
from peagle_train.files import read_json
from peagle_train.recipe.schema import Recipe
from peagle_train.training.launch import make_accelerator
from peagle_train.training.tracking import curves, trackers
from tests.recipe.test_load import GOOD
from tests.training.conftest import Made
from tests.training.test_loop import log_of, make_loop


class Killed(Exception):
    pass


TRACKERS = ["tensorboard", "wandb", "mlflow", "trackio"]
SECRET = "0123456789abcdef" * 2 + "deadbeef"

Points = list[tuple[str, int, float]]
"""Curve, step, value."""


@pytest.fixture(scope="module")
def trackio_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where trackio writes; it asks once, when it is first imported."""
    assert "trackio" not in sys.modules
    folder = tmp_path_factory.mktemp("trackio")
    os.environ["TRACKIO_DIR"] = str(folder)
    return folder


@pytest.fixture(autouse=True)
def calls(trackio_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[bytes]]:
    """What reached the listener; a test that leaves anything here fails."""
    heard: list[bytes] = []
    listener = socket.create_server(("127.0.0.1", 0))

    def listen() -> None:
        with contextlib.suppress(OSError):
            while True:
                caller, _ = listener.accept()
                with caller:
                    heard.append(caller.recv(1000))

    threading.Thread(target=listen, daemon=True).start()
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    for name in ("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY", "TRACKIO_SERVER_URL", "MLFLOW_TRACKING_URI"):
        monkeypatch.setenv(name, address)
        monkeypatch.setenv(name.lower() if name.endswith("PROXY") else name, address)
    monkeypatch.setenv("WANDB_API_KEY", SECRET)
    monkeypatch.setenv("HF_TOKEN", f"hf_{SECRET}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    connect = socket.socket.connect

    def near(self: socket.socket, to: Any) -> None:
        if self.family != socket.AF_UNIX and to[0] not in ("127.0.0.1", "::1", "localhost"):
            heard.append(f"connect {to}".encode())
            raise OSError(f"no way to {to}")
        connect(self, to)

    monkeypatch.setattr(socket.socket, "connect", near)
    yield heard
    if "wandb" in sys.modules:
        import wandb

        wandb.teardown()  # its service reads the surroundings when it starts
    close_session()  # the Hub's client keeps the proxy it was made with
    listener.close()
    assert heard == []


def recipe_with(log_with: list[str], **track: Any) -> Recipe:
    section = {"log_with": log_with, "offline": True, "project": "curves", **track}
    values = yaml.safe_load(GOOD)
    values["target"]["device"], values["train"]["precision"] = "cpu", "fp32"
    return Recipe.model_validate({**values, "track": section})


def train(
    made: Made,
    directory: Path,
    recipe: Recipe,
    die_at: int | None = None,
    console: Console | None = None,
) -> None:
    """Trains as the stage does; `die_at` is the step that does not come to pass."""
    loop = make_loop(made, directory)
    loop.accelerator = make_accelerator(
        SimpleNamespace(recipe=recipe, training_dir=directory)  # type: ignore[arg-type]
    )
    step = loop._step

    def mortal(number: int) -> dict[str, Any]:
        if number == die_at:
            raise Killed
        return step(number)

    loop._step = mortal  # type: ignore[method-assign]
    with trackers(loop.accelerator, recipe, directory, console or loop.console) as loop.tracking:
        loop.run()


def logged(directory: Path) -> dict[tuple[str, int], float]:
    """What the trackers should show. Throughput is left out: steps taken again ran at another speed."""
    return {
        (name, record["step"]): value
        for record in log_of(directory)
        for name, value in curves({"tokens_per_second": 0.0, **record}).items()
        if name != "train/tokens_per_second"
    }


def in_tensorboard(directory: Path, _: Path) -> Points:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    folder = directory / "tracking" / "curves"
    assert all(file.is_file() for file in folder.iterdir())  # a folder would be another run
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    assert "recipe/text_summary" in events.Tags()["tensors"]
    return [(name, e.step, e.value) for name in events.Tags()["scalars"] for e in events.Scalars(name)]


def in_wandb(directory: Path, _: Path) -> Points:
    import json

    from wandb.proto import wandb_internal_pb2

    files = sorted((directory / "tracking" / "wandb").glob("offline-run-*/run-*.wandb"), key=os.path.getmtime)
    points: Points = []
    ids = set()
    for file in files:
        for payload in leveldb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record.FromString(payload)
            if record.HasField("run"):
                ids.add((record.run.project, record.run.run_id, record.run.display_name))
                config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
                config.pop("_wandb", None)
                assert config == recipe_with(["wandb"]).model_dump(mode="json")
            items = {
                (item.key or item.nested_key[0]): json.loads(item.value_json) for item in record.history.item
            }
            step = items.get("_step", record.history.step.num)
            points += [(name, step, value) for name, value in items.items() if not name.startswith("_")]
    assert len(ids) == 1 and next(iter(ids))[::2] == ("curves", "tiny")
    return points


def leveldb_records(data: bytes) -> Iterator[bytes]:
    """The records of a log in LevelDB's format after wandb's own seven bytes.

    Blocks of 32 KiB hold pieces of checksum (4), length (2), kind (1), content; kinds: 1 a whole record,
    2 its first piece, 3 a middle one, 4 its last.
    """
    assert data.startswith(b":W&B")
    place, pieces = 7, b""
    while place + 7 <= len(data):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        length, kind = int.from_bytes(data[place + 4 : place + 6], "little"), data[place + 6]
        if kind == 0:
            break
        pieces += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in (1, 4):
            yield pieces
            pieces = b""


def in_mlflow(directory: Path, _: Path) -> Points:
    from mlflow.tracking import MlflowClient

    client = MlflowClient(f"sqlite:///{directory / 'tracking' / 'mlflow' / 'mlflow.db'}")
    (experiment,) = client.search_experiments(filter_string="name = 'curves'")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "tiny" and run.data.params["train.steps"] == "20"
    return [
        (name, point.step, point.value)
        for name in run.data.metrics
        for point in client.get_metric_history(run.info.run_id, name)
    ]


def in_trackio(directory: Path, folder: Path) -> Points:
    from trackio.sqlite_storage import SQLiteStorage

    state = read_json(directory / "tracking" / "state.json")
    name = f"tiny-{state['trackio/curves']['id']}"
    assert (folder / "curves.db").is_file() and SQLiteStorage.get_runs("curves").count(name) == 1
    return [
        (key, row["step"], value)
        for row in SQLiteStorage.get_logs("curves", name)
        for key, value in row.items()
        if key.startswith(("train/", "validation/"))
    ]


READERS: dict[str, Callable[[Path, Path], Points]] = {
    "tensorboard": in_tensorboard,
    "wandb": in_wandb,
    "mlflow": in_mlflow,
    "trackio": in_trackio,
}


@pytest.mark.parametrize("name", TRACKERS)
def test_a_killed_and_resumed_training_is_one_run_that_shows_the_log(
    made: Made, tmp_path: Path, trackio_folder: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Killed):
        train(made, tmp_path / "t", recipe_with([name]), die_at=10)
    # Steps 9 and 10 were shown, and are taken again from the checkpoint of step 8.
    train(made, tmp_path / "t", recipe_with([name]))
    points = READERS[name](tmp_path / "t", trackio_folder)
    shown = {(curve, step): value for curve, step, value in points}
    assert len(points) == len(shown)  # no point twice
    assert {step for curve, step in shown if curve == "train/tokens_per_second"} == set(range(1, 13))
    assert {k: v for k, v in shown.items() if k[0] != "train/tokens_per_second"} == pytest.approx(
        logged(tmp_path / "t"), rel=1e-6
    )
    assert {path.name for path in tmp_path.iterdir()} == {"t"}  # nothing beside the run's folder
    for file in [*tmp_path.rglob("*"), *trackio_folder.rglob("*")]:
        assert not file.is_file() or SECRET.encode() not in file.read_bytes(), file


def test_the_listener_hears_what_leaves(calls: list[bytes]) -> None:
    with pytest.raises(OSError):
        urllib.request.build_opener().open("http://tracker.invalid/", timeout=10)  # a global one may be older
    assert b"tracker.invalid" in calls.pop()


def test_every_curve_has_its_name_and_depths_without_elements_have_no_point() -> None:
    record = {"step": 3, "epoch": 0, "loss": 2.0, "accuracy": [0.5, None, 0.0], "learning_rate": 1e-3}
    record |= {"gradient_norm": 0.7, "elements": 40, "tokens": 99, "tokens_per_second": 12.5}
    assert curves(record) == {
        "train/loss": 2.0,
        "train/accuracy/depth_1": 0.5,
        "train/accuracy/depth_3": 0.0,
        "train/learning_rate": 1e-3,
        "train/gradient_norm": 0.7,
        "train/tokens_per_second": 12.5,
        "train/elements": 40,
    }
    score = {"acceptance_length": 1.5, "per_position": [0.4, 0.1], "num_drafts": 9, "k": 2}
    assert curves({"step": 3, "validation": score}) == {
        "validation/acceptance_length": 1.5,
        "validation/accepted_at/1": 0.4,
        "validation/accepted_at/2": 0.1,
    }


def test_without_trackers_nothing_is_started_or_written(made: Made, tmp_path: Path) -> None:
    train(made, tmp_path / "t", recipe_with([]))
    assert {path.name for path in (tmp_path / "t").iterdir()} == {
        *("best", "checkpoints", "draft_vocabulary.safetensors", "log.jsonl")
    }


def test_a_tracker_turned_on_late_shows_the_whole_curve(made: Made, tmp_path: Path) -> None:
    train(made, tmp_path / "t", recipe_with([]))
    train(made, tmp_path / "t", recipe_with(["tensorboard"]))  # no step is left to take
    shown = {(curve, step): value for curve, step, value in in_tensorboard(tmp_path / "t", tmp_path)}
    assert {k: v for k, v in shown.items() if k[0] != "train/tokens_per_second"} == pytest.approx(
        logged(tmp_path / "t"), rel=1e-6
    )


def test_a_tracker_that_fails_stops_no_training_and_catches_up(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log = TensorBoardTracker.log

    def failing(self: TensorBoardTracker, values: dict, step: int | None = None, **rest: Any) -> None:
        if step == 5:
            raise ConnectionError("no answer from https://me:password@server/api")
        log(self, values, step=step, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(TensorBoardTracker, "log", failing)
        train(made, tmp_path / "t", recipe_with(["tensorboard"]), console=Console(width=200))
    said = " ".join(capsys.readouterr().out.split())
    assert "track: tensorboard failed" in said and "from https://server/api" in said
    assert [r["step"] for r in log_of(tmp_path / "t") if "loss" in r] == list(range(1, 13))
    assert max(step for _, step, _ in in_tensorboard(tmp_path / "t", tmp_path)) == 4
    train(made, tmp_path / "t", recipe_with(["tensorboard"]))
    points = in_tensorboard(tmp_path / "t", tmp_path)
    assert [step for curve, step, _ in points if curve == "train/loss"] == list(range(1, 13))


def test_another_project_is_another_run(made: Made, tmp_path: Path) -> None:
    with pytest.raises(Killed):
        train(made, tmp_path / "t", recipe_with(["tensorboard"], project="before"), die_at=5)
    train(made, tmp_path / "t", recipe_with(["tensorboard"]))
    steps = [step for curve, step, _ in in_tensorboard(tmp_path / "t", tmp_path) if curve == "train/loss"]
    assert steps == list(range(1, 13))


def test_mlflow_stopped_while_it_makes_its_tables_starts_again(
    made: Made, tmp_path: Path, trackio_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mlflow.store.db.utils

    def stopped(engine: Any) -> None:
        with engine.begin() as connection:  # what a kill leaves: a table, and no note of its version
            connection.exec_driver_sql("CREATE TABLE metrics (key VARCHAR(250))")
        raise Killed

    with monkeypatch.context() as patch, pytest.raises(PeagleError, match="mlflow cannot start"):
        patch.setattr(mlflow.store.db.utils, "_initialize_tables", stopped)
        # mlflow keeps connections by file name, and another process has another name for what is unfinished.
        patch.setattr("peagle_train.files._TEMPORARY", ".killed")
        train(made, tmp_path / "t", recipe_with(["mlflow"]))
    train(made, tmp_path / "t", recipe_with(["mlflow"]))
    points = in_mlflow(tmp_path / "t", trackio_folder)
    assert sorted(step for curve, step, _ in points if curve == "train/loss") == list(range(1, 13))


def test_a_tracker_that_cannot_start_is_one_error_before_training(made: Made, tmp_path: Path) -> None:
    (tmp_path / "t" / "tracking").mkdir(parents=True)
    (tmp_path / "t" / "tracking" / "curves").write_text("no folder")
    with pytest.raises(PeagleError, match=r"track\.log_with: tensorboard cannot start: .*curves.*; mend"):
        train(made, tmp_path / "t", recipe_with(["tensorboard"]))
    assert not (tmp_path / "t" / "log.jsonl").exists()


REFUSED = """
import importlib, sys
trackers = ["tensorboard", "tensorboardX", "wandb", "mlflow", "trackio"]
sys.modules.update(dict.fromkeys(trackers))  # as if not installed
import peagle_train.training.stage
from peagle_train.errors import PeagleError
from peagle_train.recipe.schema import TrackSection
from peagle_train.training.tracking import require_trackers

def refused(**track):
    try:
        require_trackers(TrackSection(**track))
    except PeagleError as error:
        print(f"refused: {error}", file=sys.stderr)

refused()
refused(log_with=["wandb", "tensorboard"])
for name in trackers:
    del sys.modules[name]
importlib.reload(sys.modules["accelerate.tracking"])  # looks again at what is installed
refused(log_with=["wandb"], offline=True)
refused(log_with=["wandb"])
"""


def test_absent_packages_and_a_missing_key_are_errors_that_name_the_cure(tmp_path: Path) -> None:
    """At a terminal, where wandb would ask for a key and wait."""
    surroundings = {k: v for k, v in os.environ.items() if not k.startswith("WANDB_")}
    surroundings |= {"HOME": str(tmp_path), "NETRC": str(tmp_path / "none")}
    ours, theirs = pty.openpty()
    try:
        done = subprocess.run(
            [sys.executable, "-c", REFUSED],
            stdin=theirs,
            stdout=theirs,
            stderr=subprocess.PIPE,
            text=True,
            env=surroundings,
            timeout=120,
        )
    finally:
        os.close(theirs)
        os.close(ours)
    assert done.returncode == 0, done.stderr
    assert [line for line in done.stderr.splitlines() if line.startswith("refused: ")] == [
        "refused: track.log_with: not installed here: wandb, tensorboard; run `pip install wandb "
        "tensorboard` (`pip install 'peagle-train[track]'` for all trackers), or leave it out",
        "refused: track.log_with: wandb found no API key; run `wandb login`, set WANDB_API_KEY, or set "
        "track.offline=true to keep the run here and upload it later with `wandb sync`",
    ]
