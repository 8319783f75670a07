"""The answers store: round trip, exact masks, and refusal of stale and damaged content."""

from __future__ import annotations

from pathlib import Path

import pytest

from peagle_train.errors import CorruptError, PeagleError, StaleError
from peagle_train.store import AnswerRow, AnswerStore, AnswerWriter


def row(index: int, set: str = "train", generated: int = 5, finish: str = "stop") -> AnswerRow:
    tokens = list(range(100, 105 + generated))
    return AnswerRow(index, set, f"toy:{index}", "größe\u2028?", tokens, [[5, 5 + generated]], finish)  # type: ignore[arg-type]


def filled(folder: Path) -> AnswerWriter:
    writer = AnswerWriter(folder, "f1")
    writer.write_batch(1, [row(0), row(3, "chat", finish="length")])
    writer.write_batch(0, [row(2), row(1, generated=1)])
    return writer


def test_mask_of_the_toy_row_with_the_answer_at_5_to_9() -> None:
    toy = row(0)
    assert [place for place, flag in enumerate(toy.loss_mask) if flag] == [5, 6, 7, 8, 9]
    assert (len(toy.token_ids), toy.prompt_length, toy.supervised) == (10, 5, 5)


def test_mask_of_two_generated_turns() -> None:
    two = AnswerRow(0, "train", "x", "", list(range(9)), [[2, 4], [7, 9]], "stop")
    assert two.loss_mask == [False, False, True, True, False, False, False, True, True]


def test_round_trip_and_counts(tmp_path: Path) -> None:
    writer = filled(tmp_path)
    assert writer.sealed_batches() == {0, 1}
    counts = writer.seal({"train": {"too long": 2}})
    store = AnswerStore(tmp_path, expected="f1")
    assert [found.row for found in store.rows()] == [0, 1, 2, 3]
    assert [found.row for found in store.rows("train")] == [0, 1, 2]
    assert store.rows()[0] == row(0)
    assert [[found.row for found in batch] for batch in store.batches()] == [[2, 1], [0, 3]]
    assert store.counts == counts
    assert (counts["train"].rows, counts["train"].empty, counts["train"].generated_tokens) == (3, 1, 11)
    assert (counts["chat"].truncated, counts["chat"].prompt_tokens) == (1, 5)


def test_an_all_zero_mask_is_an_error(tmp_path: Path) -> None:
    blind = AnswerRow(7, "train", "toy:7", "", [1, 2, 3], [], "stop")
    with pytest.raises(CorruptError, match=r"row 7 \(toy:7\) has an all-zero loss mask"):
        AnswerWriter(tmp_path, "f1").write_batch(0, [blind])


def test_spans_outside_the_row_are_an_error(tmp_path: Path) -> None:
    for spans in ([[0, 2]], [[2, 9]], [[2, 3], [1, 2]]):
        with pytest.raises(CorruptError, match="spans"):
            AnswerWriter(tmp_path, "f1").write_batch(
                0, [AnswerRow(0, "a", "b", "", [1, 2, 3], spans, "stop")]
            )


def test_an_unsealed_store_says_what_to_run(tmp_path: Path) -> None:
    filled(tmp_path)
    with pytest.raises(PeagleError, match="peagle prepare"):
        AnswerStore(tmp_path)


def test_stale_fingerprints_are_refused(tmp_path: Path) -> None:
    filled(tmp_path).seal()
    with pytest.raises(StaleError, match="f1, expected f2"):
        AnswerStore(tmp_path, expected="f2")
    with pytest.raises(StaleError, match="f1, expected f2"):
        AnswerWriter(tmp_path, "f2").sealed_batches()


def test_one_changed_byte_is_found_and_named(tmp_path: Path) -> None:
    writer = filled(tmp_path)
    writer.seal()
    path = tmp_path / "batch-00001.jsonl"
    path.write_bytes(path.read_bytes().replace(b"101", b"102", 1))
    for action in (AnswerStore(tmp_path).verify, writer.sealed_batches):
        with pytest.raises(CorruptError, match=r"batch-00001\.jsonl.*run `peagle prepare"):
            action()
    path.unlink()
    with pytest.raises(CorruptError, match=r"batch-00001\.jsonl: missing"):
        AnswerStore(tmp_path).rows()
