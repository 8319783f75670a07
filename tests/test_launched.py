"""Training under a launch file: what is started, with whose lock, and how it ends."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from peagle_train import Run, launched, run_all
from peagle_train.errors import PeagleError
from peagle_train.launched import LaunchError, launch_here, processes_for, train_launched
from peagle_train.lock import FolderLock
from peagle_train.pipeline import run_stage
from peagle_train.recipe import load_recipe
from peagle_train.stages import begin, read_record, seal
from tests.tiny_run import tiny_recipe

ONE_CPU = """compute_environment: LOCAL_MACHINE
distributed_type: 'NO'
num_machines: 1
num_processes: 1
mixed_precision: 'no'
use_cpu: true
"""
STUB = """import os, signal, sys, time
from pathlib import Path
Path(sys.argv[0]).with_name("called").write_text(repr(sys.argv[1:]))
{body}
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A recipe with a launch file for one process on a CPU."""
    (tmp_path / "one.yaml").write_text(ONE_CPU)
    train = {"positions": 5, "steps": 2, "launch": str(tmp_path / "one.yaml")}
    tiny_recipe(tmp_path, "tiny", heldout=1, train=train)
    return tmp_path


@pytest.fixture
def run(folder: Path) -> Iterator[Run]:
    with Run.open(folder / "tiny.yaml", ["seed=3"]) as opened:
        yield opened


def a_launcher(monkeypatch: pytest.MonkeyPatch, folder: Path, body: str) -> None:
    """A stand-in for accelerate that notes its arguments and does `body`."""
    (folder / "stub.py").write_text(STUB.format(body=body))
    monkeypatch.setattr(launched, "LAUNCHER", (sys.executable, str(folder / "stub.py")))


def quiet() -> Console:
    return Console(file=io.StringIO(), width=200)


def said(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_without_a_gpu_one_process_trains_and_says_so(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    console = quiet()
    monkeypatch.setattr(launched, "gpus", lambda: 0)
    assert launch_here(run, console) is None
    assert "one.yaml is for GPUs, and target.device is cpu: training in one process" in said(console)
    with Run.open(run.source, ["target.device=auto"]) as other:
        assert launch_here(other, console) is None
    assert "there is no GPU here" in said(console)


def test_a_file_for_several_machines_is_started_by_hand(folder: Path) -> None:
    overrides = ["train.launch=recipes/accelerate/two_nodes.yaml"]
    with Run.open(folder / "tiny.yaml", overrides) as run, pytest.raises(PeagleError) as caught:
        launch_here(run, quiet())
    assert "starts 2 machines" in str(caught.value) and "scripts/train.slurm" in str(caught.value)


def test_a_missing_file_is_told_before_any_work(folder: Path) -> None:
    with (
        Run.open(folder / "tiny.yaml", ["train.launch=none.yaml"]) as run,
        pytest.raises(PeagleError, match=r"none\.yaml: no such launch file"),
    ):
        run_all(run, quiet())
    assert not (folder / "runs" / "tiny" / "answers").exists()


def test_processes_leave_room_for_a_target_beside_them() -> None:
    def processes(*overrides: str) -> int:
        return processes_for(load_recipe("qwen3-coder", overrides), 8)

    assert processes() == 8
    assert processes("target.device=cuda:4") == 8  # stored states: the target is long gone
    assert processes("target.device=cuda:4", "states.mode=online") == 4
    assert processes("target.device=cuda:6", "states.mode=online") == 2


def test_the_launcher_is_told_file_processes_recipe_and_overrides(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(launched, "gpus", lambda: 4)
    a_launcher(monkeypatch, folder, "")
    file = folder / "one.yaml"
    with pytest.raises(PeagleError, match="ended without an error and without a result"):
        train_launched(run, file, quiet())
    expected = ["--config_file", str(file), "--num_processes", "4", "-m", "peagle_train.training"]
    assert (folder / "called").read_text() == repr([*expected, run.source, "seed=3"])


def test_the_run_folder_is_lent_and_taken_back(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a_launcher(
        monkeypatch,
        folder,
        f"from peagle_train.lock import FolderLock; FolderLock(Path({str(run.directory)!r})); sys.exit(7)",
    )
    with pytest.raises(LaunchError, match="ended with exit code 7") as caught:
        train_launched(run, folder / "one.yaml", quiet())
    assert caught.value.exit_code == 7
    code = (
        "import sys; from pathlib import Path; from peagle_train.lock import FolderLock; "
        "FolderLock(Path(sys.argv[1]))"
    )
    other = subprocess.run([sys.executable, "-c", code, str(run.directory)], capture_output=True, text=True)
    assert other.returncode == 1 and "another process at work here" in other.stderr
    FolderLock(run.directory).release()  # it is this process's own


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_goes_to_the_whole_launch(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals
) -> None:
    """A launcher that does not pass it on, and a training behind it that saves and leaves."""
    training = (
        f"import signal, sys, time\\n"
        f"saved = lambda *_: (open({str(folder / 'saved')!r}, 'w').close(), sys.exit(0))\\n"
        f"signal.signal({int(number)}, saved)\\n"
        f"open({str(folder / 'ready')!r}, 'w').close()\\n"
        f"time.sleep(60)"
    )
    a_launcher(
        monkeypatch,
        folder,
        "import subprocess\n"
        f"signal.signal({int(number)}, signal.SIG_IGN)\n"
        f'sys.exit(subprocess.call([sys.executable, "-c", "{training}"]) or 1)',
    )
    if os.fork() == 0:
        while not (folder / "ready").exists():
            time.sleep(0.02)
        os.kill(os.getppid(), number)
        os._exit(0)
    with pytest.raises(LaunchError, match=f"ended by {number.name}") as caught:
        train_launched(run, folder / "one.yaml", quiet())
    os.wait()
    assert caught.value.exit_code == 128 + number and (folder / "saved").exists()
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL  # as it was


def test_a_training_that_was_there_is_skipped(
    run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The launched process proves it; here it leaves the record as it is, or writes another."""
    begin(run.training_dir, {"stage": "train"}, quiet())
    seal(run.training_dir, {"stage": "train"}, 12.0)
    a_launcher(monkeypatch, folder, "")
    again = train_launched(run, folder / "one.yaml", quiet())
    assert again.skipped and again.seconds == 12.0 and "already there" in again.message
    record = run.training_dir / "stage.json"
    a_launcher(
        monkeypatch,
        folder,
        "import json\n"
        f"record = Path({str(record)!r})\n"
        'record.write_text(json.dumps({**json.loads(record.read_text()), "finished": "later"}))',
    )
    assert not train_launched(run, folder / "one.yaml", quiet()).skipped


@pytest.mark.slow
def test_a_real_launch_trains(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launched, "gpus", lambda: 1)
    for stage in ("prepare", "extract"):
        run_stage(run, stage, Console(quiet=True))
    result = train_launched(run, folder / "one.yaml", quiet())
    assert not result.skipped and result.name == "train" and result.seconds > 0
    record = read_record(run.training_dir)
    assert record is not None and record.parts["processes"] == 1 and record.parts["seed"] == 3
    assert run_stage(run, "export", quiet()).name == "export"
