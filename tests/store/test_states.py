"""The states store: round trip in every dtype, random access, and refusal of stale and damaged content."""

from __future__ import annotations

import pickle
from pathlib import Path

import pytest
import torch

from peagle_train.errors import CorruptError, PeagleError, StaleError
from peagle_train.store import StateRow, StateStore, StateWriter, bytes_per_token

AUX, HIDDEN = (1, 3), 4


def row(index: int, n: int = 6, set: str = "train") -> StateRow:
    generator = torch.Generator().manual_seed(index)
    mask = torch.zeros(n, dtype=torch.bool)
    mask[2:] = True
    return StateRow(
        index,
        set,
        f"toy:{index}",
        torch.arange(n),
        mask,
        torch.randn(n - 1, len(AUX) * HIDDEN, generator=generator),
        torch.randn(n - 1, HIDDEN, generator=generator),
        2,
    )


def writer(folder: Path, fingerprint: str = "f1", dtype: str = "float32") -> StateWriter:
    return StateWriter(folder, fingerprint, AUX, HIDDEN, dtype)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_round_trip_with_random_access(tmp_path: Path, dtype: str) -> None:
    build = writer(tmp_path, dtype=dtype)
    build.write_batch(1, [row(3), row(0, 9)])
    build.write_batch(0, [row(2, 4, "chat")])
    build.seal()
    store = StateStore(tmp_path, expected="f1")
    assert (store.aux_layers, store.hidden_size, store.dtype, len(store)) == ([1, 3], 4, dtype, 3)
    assert [(info.row, info.tokens, info.supervised) for info in store.info()] == [
        (0, 9, 7),
        (2, 4, 2),
        (3, 6, 4),
    ]
    assert [info.row for info in store.info("chat")] == [2]
    for index, n in ((3, 6), (0, 9), (3, 6)):
        found, made = store.read(index), row(index, n)
        assert torch.equal(found.token_ids, made.token_ids)
        assert torch.equal(found.loss_mask, made.loss_mask)
        assert torch.equal(found.aux, made.aux.to(getattr(torch, dtype)))
        assert torch.equal(found.last, made.last.to(getattr(torch, dtype)))
        assert (found.id, found.prompt_length) == (f"toy:{index}", 2)
    store.verify()


def test_the_estimate_is_what_the_tensors_take(tmp_path: Path) -> None:
    build = writer(tmp_path, dtype="bfloat16")
    build.write_batch(0, [row(0, 400)])
    size = (tmp_path / "batch-00000.safetensors").stat().st_size
    assert 0.97 < size / (400 * bytes_per_token(len(AUX), HIDDEN, "bfloat16")) < 1.1


def test_an_open_store_travels_to_another_process(tmp_path: Path) -> None:
    build = writer(tmp_path)
    build.write_batch(0, [row(0)])
    build.seal()
    store = StateStore(tmp_path)
    store.read(0)
    assert torch.equal(pickle.loads(pickle.dumps(store)).read(0).aux, row(0).aux)


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
    build = writer(tmp_path)
    build.write_batch(0, [row(0)])
    build.seal()
    with pytest.raises(StaleError, match="f1, expected f2"):
        StateStore(tmp_path, expected="f2")
    with pytest.raises(StaleError, match="f1, expected f2"):
        writer(tmp_path, "f2").sealed_batches()


def test_one_changed_byte_is_found_and_named(tmp_path: Path) -> None:
    build = writer(tmp_path)
    build.write_batch(0, [row(0)])
    build.write_batch(1, [row(1)])
    build.seal()
    store, path = StateStore(tmp_path), tmp_path / "batch-00001.safetensors"
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(content)
    with pytest.raises(CorruptError, match=r"batch-00001\.safetensors: differs.*run `peagle extract"):
        store.verify()
    path.write_bytes(content[:-5])
    for action in (lambda: StateStore(tmp_path), build.sealed_batches):
        with pytest.raises(CorruptError, match=r"batch-00001\.safetensors: missing or cut short"):
            action()
    path.write_bytes(b"\xff" * len(content))
    with pytest.raises(CorruptError, match=r"batch-00001\.safetensors: differs"):
        StateStore(tmp_path).read(1)


def test_unknown_rows_and_sets_are_named(tmp_path: Path) -> None:
    build = writer(tmp_path)
    build.write_batch(0, [row(0)])
    build.seal()
    with pytest.raises(PeagleError, match="no row 9"):
        StateStore(tmp_path).read(9)
    with pytest.raises(PeagleError, match="no set 'chat'; it holds train"):
        StateStore(tmp_path).info("chat")
