"""Checkpoints: whole or not at all, proven when read, and no disk is filled to death."""

from __future__ import annotations

import errno
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from peagle_train.errors import CorruptError, PeagleError
from peagle_train.files import read_json, sha256_of
from peagle_train.head.acceptance import Acceptance
from peagle_train.head.io import load_head
from peagle_train.training import checkpoint, validation
from peagle_train.training.checkpoint import checkpoints, newest, require_room_to_train
from tests.training.conftest import Made
from tests.training.runs import assert_equal
from tests.training.test_loop import make_loop


def flip(file: Path) -> None:
    """Changes one bit in the middle of a file."""
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(bytes(data))


@pytest.fixture(scope="module")
def whole(made: Made, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A training that nothing disturbed, with checkpoints at 8 and 12."""
    directory = tmp_path_factory.mktemp("whole")
    make_loop(made, directory).run()
    return directory


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in (directory / "checkpoints").iterdir())


@pytest.mark.parametrize("keep", [1, 2, 3])
def test_the_newest_are_kept(made: Made, tmp_path: Path, keep: int) -> None:
    make_loop(made, tmp_path, checkpoint_every=3, keep_checkpoints=keep).run()
    assert names(tmp_path) == [f"step-0000{n:02d}" for n in (3, 6, 9, 12)][-keep:]


def test_every_file_is_checksummed_and_nothing_is_rounded(made: Made, tmp_path: Path) -> None:
    loop = make_loop(made, tmp_path)
    loop.run()
    path = checkpoints(tmp_path / "checkpoints")[-1]
    files = read_json(path / "state.json")["files"]
    assert set(files) == {p.name for p in path.iterdir()} - {"state.json"}
    assert all(entry["sha256"] == sha256_of(path / name) for name, entry in files.items())
    saved, faults = newest(tmp_path / "checkpoints")
    assert saved is not None and not faults
    moments = saved.optimizer_tensors(0)
    for name, parameter in loop.head.named_parameters():
        for key, value in loop.wrapped.optimizer.optimizer.state.get(parameter, {}).items():
            stored = moments[f"{name}|{key}"]
            assert stored.dtype == torch.float32 and torch.equal(stored, value)
    assert saved.standing == loop.standing


@pytest.mark.parametrize(
    "file", ["head.safetensors", "head.json", "optimizer-00000.safetensors", "state.json"]
)
@pytest.mark.parametrize("harm", ["flipped", "lost"])
def test_a_damaged_checkpoint_is_named_and_the_one_before_goes_on(
    made: Made, whole: Path, tmp_path: Path, file: str, harm: str
) -> None:
    shutil.copytree(whole, tmp_path / "bent")
    bent = checkpoints(tmp_path / "bent" / "checkpoints")[-1] / file
    flip(bent) if harm == "flipped" else bent.unlink()
    loop = make_loop(made, tmp_path / "bent")
    loop.console = Console(record=True, width=300, file=io.StringIO())
    loop.run()
    said = loop.console.export_text()
    assert f"step-000012/{file}: " in said and "going on from" in said and "step-000008" in said
    assert_equal(tmp_path / "bent", whole)
    assert names(tmp_path / "bent") == ["damaged-step-000012", "step-000008", "step-000012"]


def test_without_a_whole_checkpoint_the_user_decides(made: Made, whole: Path, tmp_path: Path) -> None:
    shutil.copytree(whole, tmp_path, dirs_exist_ok=True)
    for path in checkpoints(tmp_path / "checkpoints"):
        flip(path / "head.safetensors")
    with pytest.raises(CorruptError, match=r"no checkpoint is whole.*step-000012.*step-000008.*--anew"):
        make_loop(made, tmp_path).run()
    assert names(tmp_path) == ["step-000008", "step-000012"]


def test_a_damaged_best_head_makes_room_for_the_next(made: Made, tmp_path: Path) -> None:
    make_loop(made, tmp_path, steps=8).run()
    flip(tmp_path / "best" / "head.safetensors")
    make_loop(made, tmp_path, steps=12).run()
    load_head(tmp_path / "best")
    assert (tmp_path / "damaged-best").is_dir()


def test_a_better_head_of_steps_taken_again_is_not_lost(made: Made, tmp_path: Path) -> None:
    """On a GPU the same steps may lead elsewhere: here, a best head that the checkpoint knows nothing of."""
    make_loop(made, tmp_path, steps=4, validate_every=4).run()
    score = read_json(tmp_path / "best" / "score.json")
    score["step"], score["validation"]["num_accepted"] = 5, 10**6
    checkpoint.write_json(tmp_path / "best" / "score.json", score)
    standing = make_loop(made, tmp_path, steps=12).run()
    assert standing.best_step != 5
    assert read_json(tmp_path / "best" / "score.json") == score


@pytest.mark.parametrize("moment", ["best", "checkpoint"])
def test_weights_that_are_not_finite_are_never_kept(made: Made, tmp_path: Path, moment: str) -> None:
    every = {"validate_every": 6, "checkpoint_every": 5} if moment == "checkpoint" else {"validate_every": 5}
    loop = make_loop(made, tmp_path, **{"checkpoint_every": 4, **every})
    step = loop.wrapped.optimizer.step
    taken = 0

    def overflow() -> None:
        nonlocal taken
        step()
        taken += 1
        if taken == 5:
            with torch.no_grad():
                loop.head.lm_head.weight[0, 0] = float("inf")

    loop.wrapped.optimizer.step = overflow
    with pytest.raises(PeagleError, match=r"step 5: lm_head.weight is not finite any more"):
        loop.run()
    kept = [tmp_path / "best", *checkpoints(tmp_path / "checkpoints")]
    assert len(kept) == (1 if moment == "checkpoint" else 2)
    for folder in kept:
        assert all(bool(torch.isfinite(p).all()) for p in load_head(folder).parameters())


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_a_full_disk_is_told_before_a_checkpoint_touches_anything(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_loop(made, tmp_path, steps=2, checkpoint_every=1).run()
    loop = make_loop(made, tmp_path, validate_every=12)
    before = content(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    size = sum(len(data) for name, data in before.items() if "step-000002" in name) / 1e6
    with pytest.raises(
        PeagleError, match=r"checkpoint of step 4 needs ([\d.]+) MB, .* has 1\.0 MB free"
    ) as told:
        loop.run()
    needed = float(str(told.value).split(" needs ")[1].split()[0])
    assert needed == pytest.approx(size, abs=0.1)
    after = content(tmp_path)
    assert after.pop("log.jsonl").startswith(before.pop("log.jsonl"))
    assert after == before


def test_a_full_disk_is_told_before_the_best_head_is_touched(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_loop(made, tmp_path, steps=2, checkpoint_every=1).run()
    loop = make_loop(made, tmp_path, steps=4)
    before = content(tmp_path / "best")
    monkeypatch.setattr(validation, "measure", lambda *_: Acceptance(4, 9, [9, 9, 9, 9]))
    monkeypatch.setattr(shutil, "disk_usage", lambda _: SimpleNamespace(free=1 << 20))
    with pytest.raises(PeagleError, match=r"the best head needs [\d.]+ MB, .* has 1\.0 MB free"):
        loop.run()
    assert content(tmp_path / "best") == before


def test_before_the_first_step_the_disk_must_hold_all_of_it(
    made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is asked for is what is there while the last checkpoint is written, but for small files."""
    loop = make_loop(made, tmp_path / "a", checkpoint_every=3, keep_checkpoints=2)
    most, write = 0, checkpoint._write_rest

    def watch(*arguments: Any) -> None:
        nonlocal most
        write(*arguments)
        most = max(most, sum(len(data) for data in content(tmp_path / "a").values()))

    monkeypatch.setattr(checkpoint, "_write_rest", watch)
    loop.run()
    best = sum(len(data) for data in content(tmp_path / "a" / "best").values())
    asked: list[int] = []
    monkeypatch.setattr(checkpoint, "require_room", lambda _, needed, what: asked.append(needed))
    require_room_to_train(tmp_path / "b", loop.head, 2)
    assert asked[0] == pytest.approx(most + best, abs=60_000)
    require_room_to_train(tmp_path / "a", loop.head, 2)
    assert 0 < asked[1] < asked[0] / 2  # what is there already needs no room


def test_a_write_that_fails_leaves_the_checkpoint_before_whole(
    made: Made, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write = checkpoint.save_tensors

    def full(path: Path, tensors: dict[str, torch.Tensor]) -> None:
        if "step-000008" in str(path):
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))
        write(path, tensors)

    with monkeypatch.context() as patch, pytest.raises(OSError, match="No space left"):
        patch.setattr(checkpoint, "save_tensors", full)
        make_loop(made, tmp_path / "full").run()
    assert names(tmp_path / "full") == ["step-000004"]
    make_loop(made, tmp_path / "full").run()
    assert_equal(tmp_path / "full", whole)


ON_A_SMALL_DISK = """
import sys
from pathlib import Path
import torch
from accelerate import Accelerator
from peagle_train.errors import PeagleError
from peagle_train.training import checkpoint
from peagle_train.training.checkpoint import Standing, newest, save_checkpoint
from tests.head.toys import toy_head

checkpoint.require_room = lambda *_: None  # as if another program filled the disk while we write
head, disk = toy_head(), Path(sys.argv[1])
def save(step, megabytes):
    save_checkpoint(disk, Accelerator(cpu=True), head, {"w|m": torch.zeros(megabytes * 250_000)},
                    Standing(step=step), engine={}, guard={}, keep=1)
save(1, 1)
try:
    save(2, 8)
except PeagleError as error:
    print("refused:", error)
print([path.name for path in disk.iterdir()], newest(disk)[0].standing.step)
"""


def test_a_real_disk_runs_full(tmp_path: Path) -> None:
    """A disk of 4 MB in a mount namespace of its own, where the system lets users have one."""
    inside = f'mount -t tmpfs -o size=4m none {tmp_path} && exec {sys.executable} -c "$0" {tmp_path}'
    if subprocess.run(["unshare", "-Urm", "true"], capture_output=True).returncode:
        pytest.skip("the system gives users no mount namespace")
    done = subprocess.run(
        ["unshare", "-Urm", "sh", "-c", inside, ON_A_SMALL_DISK], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "refused:" in done.stdout and "could not write" in done.stdout
    assert done.stdout.splitlines()[-1] == "['step-000001'] 1"
