"""States at a URL: the same store behind a cache, on whatever fsspec knows, and faults in plain words."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from peagle_train.errors import CorruptError, PeagleError
from peagle_train.store import StateStore, StateWriter
from peagle_train.store.cache import Cache
from tests.s3_service import SECRET
from tests.store.rows import filled, harm, row, writer


@pytest.fixture(params=["file", "memory", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    if request.param == "s3":
        return str(request.getfixturevalue("s3"))
    return f"file://{tmp_path}/far" if request.param == "file" else f"memory://{tmp_path.name}"


@pytest.fixture
def far(tmp_path: Path) -> str:
    return f"file://{tmp_path}/far"


def place(url: str) -> Path:
    return Path(url.removeprefix("file://")) / "f1"


def sent(url: str) -> list[str]:
    fs, root = fsspec.core.url_to_fs(f"{url}/f1")
    fs.invalidate_cache()
    return sorted(path.rpartition("/")[2] for path in fs.find(root))


def test_it_is_the_store_of_a_folder(url: str, tmp_path: Path) -> None:
    near = tmp_path / "near"
    filled(near)
    build = filled(tmp_path / "states", url=url)
    small = {f"batch-0000{n}.{name}" for n in range(3) for name in ("json", "tokens.safetensors")}
    assert {path.name for path in (tmp_path / "states").iterdir()} == small | {"index.json"}
    assert sent(url) == sorted({path.name for path in near.iterdir()})
    assert build.sealed_batches() == {0, 1, 2} and build.damaged() == {}
    store, same = StateStore(tmp_path / "states", expected="f1"), StateStore(near)
    store.upcoming([5, 0, 3])
    for index in (5, 0, 3, 1, 2, 4, 5):
        ours, theirs = store.read(index), same.read(index)
        assert torch.equal(ours.aux, theirs.aux) and torch.equal(ours.last, theirs.last)
        assert torch.equal(ours.token_ids, theirs.token_ids) and ours.token_ids.equal(store.token_ids(index))
    store.verify()
    store.close()


def test_damage_is_found_named_and_made_anew(url: str, tmp_path: Path) -> None:
    build = filled(tmp_path / "states", url=url)
    fs, root = fsspec.core.url_to_fs(f"{url}/f1")
    content = bytearray(fs.cat_file(f"{root}/batch-00001.safetensors"))
    content[-3] ^= 1
    fs.pipe_file(f"{root}/batch-00001.safetensors", bytes(content))
    store = StateStore(tmp_path / "states")
    with pytest.raises(CorruptError, match=rf"{url}/f1/batch-00001\.safetensors: row 3 .*--repair"):
        store.read(3)
    damaged = build.damaged()
    assert list(damaged) == [1] and "differs from its checksum" in damaged[1]
    build.drop(damaged)
    assert build.sealed_batches() == {0, 2} and "batch-00001.safetensors" not in sent(url)
    assert fs.cat_file(f"{root}.damaged/batch-00001.safetensors") == bytes(content)
    build.write_batch(1, [row(2, 9), row(3, 7)])
    build.seal()
    assert torch.equal(StateStore(tmp_path / "states").read(3).aux, row(3, 7).aux[:5])
    fs.rm(f"{root}/batch-00002.safetensors")
    with pytest.raises(CorruptError, match=r"batch-00002\.safetensors: missing or cut short"):
        StateStore(tmp_path / "states")


def test_a_row_is_fetched_once_and_only_its_bytes(far: str, tmp_path: Path) -> None:
    filled(tmp_path / "states", url=far)
    fetched: list[int] = []
    store = StateStore(tmp_path / "states")
    fs = store._shards._fs  # type: ignore[union-attr]
    original = fs.cat_file

    def counted(path: str, start: int, end: int) -> bytes:
        fetched.append(end - start)
        return bytes(original(path, start=start, end=end))

    fs.cat_file = counted
    try:
        for _ in range(2):
            for index in range(6):
                store.read(index)
    finally:
        del fs.cat_file
    pieces = [entry.states.bytes for _, (_, entry) in sorted(store._rows.items())]
    assert fetched == pieces
    cached = [path.stat().st_size for path in (tmp_path / "states" / ".cache").iterdir()]
    assert sum(cached) == sum(pieces) + 31  # and the counter
    again = StateStore(tmp_path / "states")  # as after a stop: the URL is asked for sizes alone
    shutil.rmtree(place(far))
    assert again.read(4).id == "toy:4"


def test_the_cache_is_as_large_as_the_recipe_says(far: str, tmp_path: Path) -> None:
    filled(tmp_path / "states", url=far)
    piece = StateStore(tmp_path / "states")._entry(0)[1].states.bytes
    store = StateStore(tmp_path / "states", cache=2.5 * piece)
    for _ in range(3):
        for index in range(6):
            assert torch.equal(store.read(index).aux[0], row(index, 9 if index % 2 == 0 else 7).aux[0])
            files = [p for p in (tmp_path / "states" / ".cache").iterdir() if p.name != "counter"]
            assert sum(path.stat().st_size for path in files) <= 2.5 * piece
    assert len(files) >= 1


def test_a_shard_that_was_not_taken_does_not_count(
    far: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    build = writer(tmp_path / "states", url=far)
    build.write_batch(0, [row(0)])
    fs = build._shards._fs  # type: ignore[union-attr]

    def broken(*_: Any) -> None:
        raise ConnectionError("the line is cut?X-Amz-Signature=abc")

    monkeypatch.setattr(fs, "put_file", broken)
    with pytest.raises(PeagleError, match=rf"{far}/f1/batch-00001.safetensors: could not send it") as caught:
        build.write_batch(1, [row(1)])
    assert "Signature" not in str(caught.value) and build.sealed_batches() == {0}
    monkeypatch.undo()
    build.write_batch(1, [row(1)])
    assert build.sealed_batches() == {0, 1}


def test_stores_of_other_inputs_do_not_meet_at_a_url(far: str, tmp_path: Path) -> None:
    filled(tmp_path / "one", url=far)
    build = writer(tmp_path / "two", "f2", url=far)
    assert build.sealed_batches() == set()
    build.write_batch(0, [row(0, 12)])
    build.seal()
    StateStore(tmp_path / "one").verify()
    assert len(StateStore(tmp_path / "two", expected="f2")) == 1


def test_a_disk_without_room_for_the_cache_is_told_when_the_store_is_opened(
    far: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    filled(tmp_path / "states", url=far)
    monkeypatch.setattr("peagle_train.files.shutil.disk_usage", lambda path: type("U", (), {"free": 10}))
    with pytest.raises(PeagleError, match=r"\.cache: the cache of states \(states\.cache\) needs"):
        StateStore(tmp_path / "states")


def test_without_s3fs_the_cure_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "s3fs", None)  # an import of it fails
    monkeypatch.delitem(sys.modules["fsspec.registry"]._registry, "s3", raising=False)
    with pytest.raises(PeagleError, match=r"run `pip install 'peagle-train\[s3\]'`"):
        writer(tmp_path, url="s3://bucket/prefix")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("bucket/prefix", "expected a URL such as s3://"),
        ("nothing://a/b", "expected a URL that fsspec knows"),
        (f"s3://AKIATEST:{SECRET}@bucket/prefix", "a user, a password or a query"),
        (f"https://host/prefix?sig={SECRET}", "a user, a password or a query"),
    ],
)
def test_a_url_that_is_none_is_refused_and_no_secret_repeated(url: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(PeagleError, match=message) as caught:
        StateWriter(tmp_path, "f1", [1], 4, "float32", url)
    assert SECRET not in str(caught.value)


def test_what_s3_refuses_is_told_without_a_secret(s3: str, tmp_path: Path) -> None:
    with pytest.raises(PeagleError, match=r"could not .*credentials") as caught:
        filled(tmp_path, url="s3://no-such-bucket/prefix")
    assert SECRET not in str(caught.value) and "AKIATEST" not in str(caught.value)
    assert not fsspec.filesystem("s3").exists("s3://no-such-bucket")  # nor was one made


def test_a_harmed_piece_in_the_cache_is_fetched_again(far: str, tmp_path: Path) -> None:
    filled(tmp_path / "states", url=far)
    store = StateStore(tmp_path / "states")
    first = store.read(2)
    harm(next((tmp_path / "states" / ".cache").glob("00000002-*")))
    assert torch.equal(store.read(2).aux, first.aux)
    assert isinstance(store._shards.cache, Cache)  # type: ignore[union-attr]
