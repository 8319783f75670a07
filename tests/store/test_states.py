"""The states store: round trip in every dtype, random access, and refusal of stale and damaged content."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch

from peagle_train.errors import CorruptError, PeagleError, StaleError
from peagle_train.head.alignment import needed_states
from peagle_train.store import StateRow, StateStore
from tests.store.rows import filled, harm, row, writer


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_trip_with_random_access(tmp_path: Path, dtype: str) -> None:
    build = writer(tmp_path, dtype=dtype)
    build.write_batch(1, [row(3), row(0, 9)])
    build.write_batch(0, [row(2, 4, "chat"), row(4, 3)])
    build.seal()
    store = StateStore(tmp_path, expected="f1")
    assert (store.aux_layers, store.hidden_size, store.dtype, len(store)) == ([1, 3], 4, dtype, 4)
    assert [(info.row, info.tokens, info.supervised) for info in store.info()] == [
        (0, 9, 7),
        (2, 4, 2),
        (3, 6, 4),
        (4, 3, 1),
    ]
    assert [info.row for info in store.info("chat")] == [2]
    for index, n in ((3, 6), (0, 9), (3, 6), (4, 3)):
        found, made = store.read(index), row(index, n)
        assert torch.equal(found.token_ids, made.token_ids) and found.token_ids.dtype == torch.int64
        assert torch.equal(store.token_ids(index), made.token_ids)
        assert torch.equal(found.loss_mask, made.loss_mask)
        assert torch.equal(store.loss_mask(index), made.loss_mask)
        slots, outputs = needed_states(made.loss_mask)
        assert torch.equal(found.aux, made.aux[:slots].to(getattr(torch, dtype)))
        assert torch.equal(found.last, made.last[outputs].to(getattr(torch, dtype)))
        assert (found.id, found.prompt_length) == (f"toy:{index}", 2)
    store.verify()


def test_a_row_that_was_read_can_be_written_again(tmp_path: Path) -> None:
    filled(tmp_path / "one")
    one = StateStore(tmp_path / "one")
    build = writer(tmp_path / "two")
    build.write_batch(0, [one.read(info.row) for info in one.info()])
    build.seal()
    two = StateStore(tmp_path / "two")
    for info in one.info():
        assert torch.equal(one.read(info.row).aux, two.read(info.row).aux)
        assert torch.equal(one.read(info.row).last, two.read(info.row).last)


def test_an_open_store_travels_to_another_process(tmp_path: Path) -> None:
    filled(tmp_path)
    store = StateStore(tmp_path)
    store.upcoming([0, 1])
    assert torch.equal(pickle.loads(pickle.dumps(store)).read(0).aux, store.read(0).aux)
    store.close()


def test_wrong_shapes_values_and_masks_never_reach_the_disk(tmp_path: Path) -> None:
    good = row(5)
    bad = {
        r"aux is \[4, 8\], expected \[5, 8\]": {"aux": good.aux[1:]},
        r"last is \[5, 3\], expected \[5, 4\]": {"last": good.last[:, 1:]},
        "all-zero loss mask": {"loss_mask": torch.zeros(6, dtype=torch.bool)},
        "NaN or Inf": {"last": good.last.clone().fill_(float("nan"))},
    }
    for message, change in bad.items():
        with pytest.raises(PeagleError, match=message):
            writer(tmp_path).write_batch(0, [StateRow(**{**good.__dict__, **change})])
    huge = StateRow(**{**good.__dict__, "aux": good.aux.clone().fill_(1e6)})
    with pytest.raises(PeagleError, match="as float16; the target overflows"):
        writer(tmp_path, dtype="float16").write_batch(0, [huge])
    assert list(tmp_path.iterdir()) == []


def test_a_shard_without_its_sidecar_is_not_sealed(tmp_path: Path) -> None:
    build = writer(tmp_path)
    build.write_batch(0, [row(0)])
    build.write_batch(1, [row(1)])
    (tmp_path / "batch-00001.json").unlink()
    assert build.sealed_batches() == {0}
    with pytest.raises(PeagleError, match="peagle extract"):
        StateStore(tmp_path)


def test_stale_fingerprints_are_refused(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(StaleError, match="f1, expected f2"):
        StateStore(tmp_path, expected="f2")
    for action in (writer(tmp_path, "f2").sealed_batches, writer(tmp_path, "f2").damaged):
        with pytest.raises(StaleError, match="f1, expected f2"):
            action()


def test_a_store_of_the_format_before_is_refused_with_the_cure(tmp_path: Path) -> None:
    """As format 1 left it: its sidecars name one file and no spans."""
    old = {"format": "peagle-states-1", "fingerprint": "f1", "batch": 0, "file": "batch-00000.safetensors"}
    (tmp_path / "batch-00000.json").write_text(json.dumps({**old, "bytes": 1, "sha256": "", "rows": []}))
    (tmp_path / "index.json").write_text(json.dumps({"format": "peagle-states-1", "shards": []}))
    with pytest.raises(StaleError, match=r"'peagle-states-1'.*'peagle-states-2'.*run `peagle extract"):
        StateStore(tmp_path)
    with pytest.raises(StaleError, match=r"format 'peagle-states-1'.*extract again"):
        writer(tmp_path).sealed_batches()


CURE = "run `peagle extract RECIPE --repair`"


def test_one_changed_byte_is_found_and_its_row_named(tmp_path: Path) -> None:
    build = filled(tmp_path)
    path = tmp_path / "batch-00001.safetensors"
    harm(path)
    store = StateStore(tmp_path)
    store.read(2)  # its neighbour in the shard is sound
    with pytest.raises(CorruptError, match=rf"00001\.safetensors: row 3 \(train toy:3\).*checksum.*{CURE}"):
        store.read(3)
    with pytest.raises(CorruptError, match=rf"batch-00001\.safetensors: differs.*{CURE}"):
        store.verify()
    harm(tmp_path / "batch-00002.tokens.safetensors")
    with pytest.raises(
        CorruptError, match=r"00002\.tokens\.safetensors: row 5 \(train toy:5\): its token ids"
    ):
        store.token_ids(5)
    assert sorted(build.damaged()) == [1, 2]


def test_a_file_that_is_cut_short_is_found_and_named(tmp_path: Path) -> None:
    build = filled(tmp_path)
    path = tmp_path / "batch-00001.safetensors"
    store = StateStore(tmp_path)
    path.write_bytes(path.read_bytes()[:-5])
    for action in (lambda: StateStore(tmp_path), build.sealed_batches):
        with pytest.raises(CorruptError, match=rf"batch-00001\.safetensors: missing or cut short; {CURE}"):
            action()
    with pytest.raises(CorruptError, match=r"row 3 \(train toy:3\).*ends at byte \d+, before the row does"):
        store.read(3)  # it was whole when the store was opened
    path.unlink()
    with pytest.raises(CorruptError, match=r"row 2 \(train toy:2\).*No such file"):
        store.read(2)


def test_shards_that_were_exchanged_are_found_and_named(tmp_path: Path) -> None:
    build = filled(tmp_path)
    store = StateStore(tmp_path)
    one, two = (tmp_path / f"batch-0000{batch}.safetensors" for batch in (1, 2))
    exchange(one, two)
    with pytest.raises(
        CorruptError, match=r"00001\.safetensors: row 3 .*it holds batch 2 of f1.*: files were exch"
    ):
        store.read(3)
    assert sorted(build.damaged()) == [1, 2]
    assert all("exchanged" in fault for fault in build.damaged().values())


def test_a_sidecar_of_another_shard_is_found_and_named(tmp_path: Path) -> None:
    build = filled(tmp_path)
    for name in ("json", "safetensors", "tokens.safetensors"):  # whole batches, one under the other's name
        exchange(tmp_path / f"batch-00000.{name}", tmp_path / f"batch-00002.{name}")
    with pytest.raises(
        CorruptError, match=r"batch-0000\d\.json: the sidecar of batch \d, in the place of an"
    ):
        build.sealed_batches()
    assert sorted(build.damaged()) == [0, 2]
    with pytest.raises(CorruptError, match=r"row 0 \(train toy:0\)"):
        StateStore(tmp_path).read(0)


def exchange(one: Path, two: Path) -> None:
    aside = one.with_name("aside")
    one.rename(aside)
    two.rename(one)
    aside.rename(two)


def test_repairing_drops_exactly_what_is_damaged(tmp_path: Path) -> None:
    folder = tmp_path / "states"
    build = filled(folder, batches=7)
    whole = {path.name: path.read_bytes() for path in folder.iterdir()}
    harm(folder / "batch-00001.safetensors")
    (folder / "batch-00002.safetensors").unlink()
    (folder / "batch-00003.json").write_text("{")
    (folder / "batch-00004.json").unlink()
    harm(folder / "batch-00005.tokens.safetensors")
    damaged = build.damaged()
    assert sorted(damaged) == [1, 2, 3, 4, 5]
    assert "batch-00002.safetensors: missing" in damaged[2] and "not readable as JSON" in damaged[3]
    harmed = (folder / "batch-00001.safetensors").read_bytes()
    build.drop(damaged)
    assert build.sealed_batches() == {0, 6} and not (folder / "index.json").exists()
    assert (tmp_path / "states.damaged" / "batch-00001.safetensors").read_bytes() == harmed
    for batch in damaged:
        build.write_batch(batch, [row(2 * batch, 9), row(2 * batch + 1, 7)])
    build.seal()
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == whole
    assert build.damaged() == {}


def test_a_missing_index_is_no_damage(tmp_path: Path) -> None:
    build = filled(tmp_path)
    (tmp_path / "index.json").unlink()
    assert build.damaged() == {} and build.sealed_batches() == {0, 1, 2}


def test_unknown_rows_and_sets_are_named(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(PeagleError, match="no row 9; it holds 6 rows"):
        StateStore(tmp_path).read(9)
    with pytest.raises(PeagleError, match="no set 'chat'; it holds train"):
        StateStore(tmp_path).info("chat")


def test_a_copied_store_is_the_same_store(tmp_path: Path) -> None:
    filled(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    StateStore(tmp_path / "two", expected="f1").verify()
