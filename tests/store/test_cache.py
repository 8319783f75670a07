"""The cache in front of a URL: its size is kept, what is open stays, harm is noticed, processes share it."""

from __future__ import annotations

import fcntl
import multiprocessing
import os
from pathlib import Path

from peagle_train.store.cache import Cache


class Afar:
    """Pieces of one repeated letter; `asked` tells what was fetched."""

    def __init__(self, cache: Cache, size: int = 100):
        self.cache, self.size = cache, size
        self.asked: list[str] = []

    def get(self, letter: str) -> None:
        content = bytearray(letter.encode() * self.size)

        def fetch() -> bytearray:
            self.asked.append(letter)
            return content

        assert self.cache.get(letter, fetch, lambda data: data == content) == content


def lying(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "counter"}


def test_the_least_recently_used_goes_and_the_limit_is_kept(tmp_path: Path) -> None:
    afar = Afar(Cache(tmp_path, 450))
    for letter in "abcd":
        afar.get(letter)
        os.utime(tmp_path / letter, ns=(0, ord(letter)))  # used in this order, whatever the clock's grain
    afar.get("a")  # used again
    afar.get("e")
    assert sorted(lying(tmp_path)) == ["a", "c", "d", "e"]
    assert afar.asked == list("abcde")
    for letter in "fghijabcde":
        afar.get(letter)
        assert sum(lying(tmp_path).values()) <= 450


def test_what_is_open_is_never_taken(tmp_path: Path) -> None:
    afar = Afar(Cache(tmp_path, 300))
    for letter in "abc":
        afar.get(letter)
        os.utime(tmp_path / letter, ns=(0, ord(letter)))
    with (tmp_path / "a").open("rb") as reader:
        fcntl.flock(reader, fcntl.LOCK_SH)  # as a reader of another process holds it
        afar.get("d")
        assert "a" in lying(tmp_path) and "d" in lying(tmp_path)
        for letter in "efg":
            afar.get(letter)
            assert "a" in lying(tmp_path)
    for letter in "hi":
        afar.get(letter)
    assert "a" not in lying(tmp_path)


def test_a_piece_without_room_is_passed_on(tmp_path: Path) -> None:
    afar = Afar(Cache(tmp_path, 150), 200)
    afar.get("a")
    afar.get("a")
    assert afar.asked == ["a", "a"] and lying(tmp_path) == {}


def test_a_harmed_piece_is_fetched_again(tmp_path: Path) -> None:
    afar = Afar(Cache(tmp_path, 1000))
    afar.get("a")
    (tmp_path / "a").write_bytes(b"b" * 100)
    afar.get("a")
    afar.get("a")
    (tmp_path / "a").write_bytes(b"a" * 50)  # cut short
    afar.get("a")
    assert afar.asked == ["a"] * 3 and (tmp_path / "a").read_bytes() == b"a" * 100


def test_what_a_killed_writer_left_goes_first(tmp_path: Path) -> None:
    afar = Afar(Cache(tmp_path, 350))
    afar.get("a")
    (tmp_path / ".x.77-1.partial").write_bytes(b"x" * 100)
    (tmp_path / "counter").write_text("200")  # it had counted what it was about to write
    afar.get("b")
    afar.get("c")
    assert sorted(lying(tmp_path)) == ["a", "b", "c"]


def work(folder: Path, first: int, failed: list[str]) -> None:
    afar = Afar(Cache(folder, 1000))
    try:
        for step in range(300):
            afar.get("abcdefghijklmnopqrst"[(first + 7 * step) % 20])
            with afar.cache._counted():  # or names change while they are listed
                if sum(lying(folder).values()) > 1000:
                    failed.append("larger than its limit")
    except AssertionError:
        failed.append("wrong content")


def test_processes_share_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    with context.Manager() as manager:
        failed = manager.list()
        workers = [context.Process(target=work, args=(tmp_path, 3 * n, failed)) for n in range(3)]
        for worker in workers:
            worker.start()
        for worker in workers:
            worker.join()
        assert [worker.exitcode for worker in workers] == [0] * 3 and list(failed) == []
    assert not [name for name in lying(tmp_path) if name.endswith(".partial")]
