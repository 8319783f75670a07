"""What the second pass leaves in the store, for every class, and how batches are written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console

from data_prep import extract as extract_stage
from data_prep import prepare as prepare_stage
from data_prep import worker
from data_prep.jobs import Job, StatesPlan
from data_prep.worker import _Reporter
from peagle_train import Run
from peagle_train.errors import PeagleError
from peagle_train.pipeline import run_stage
from peagle_train.store import AnswerRow, StateStore
from peagle_train.target.adapter import Target
from peagle_train.twin.models import MASK_TOKENS, TWINS
from peagle_train.twin.tokenizers import GEMMA4_MEDIA
from tests.data_prep.inline import InlineJobs
from tests.tiny_run import tiny_recipe

NEAR = 1e-4  # of the largest state: batches of other sizes round otherwise
DATED = ("gpt_oss", "llama3")


@pytest.mark.parametrize("kind", TWINS)
def test_the_store_holds_hidden_states_by_their_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Through both stages and the files: aux id i is hidden_states[i], the last one is before the final norm.

    The prompts are longer than the window of the sliding twins, which is 8.
    """
    monkeypatch.setattr(prepare_stage, "run_jobs", InlineJobs())
    monkeypatch.setattr(extract_stage, "run_jobs", InlineJobs())
    folder = TWINS[kind](tmp_path / "own")
    target = Target.load(folder, dtype="float32", device="cpu")
    depth, hidden = target.facts.num_layers, target.facts.hidden_size
    layers = [0, 1, 2, depth - 1]
    keys = [
        f"target.model={folder}",
        f"head.aux_layers={layers}",
        f"head.mask_token={MASK_TOKENS[kind]}",
        "head.rope={rope_type: default, rope_theta: 10000.0}",
        "states.keep_while_answering=false",
        "states.batch_tokens=150",
        *(["data.date=2025-06-28"] if kind in DATED else []),
    ]
    with Run.open(tiny_recipe(tmp_path, "tiny", heldout=2, train={}), keys, command=("test",)) as run:
        for stage in ("prepare", "extract"):
            run_stage(run, stage, Console(quiet=True))
        store = StateStore(run.states_dir)
    assert len(store) == 14 and store.aux_layers == layers
    # A twin may say the mark of an image by chance, which the multimodal class takes for a missing image.
    media = set(target.tokenizer.convert_tokens_to_ids(list(GEMMA4_MEDIA.values())))
    rows = [store.read(info.row) for info in store.info()]
    plain = [row for row in rows if kind != "gemma4_multimodal" or media.isdisjoint(row.token_ids.tolist())]
    assert len(plain) > 5
    for row in plain:
        assert row.prompt_length > 9 and row.last_at is not None
        with torch.no_grad():
            own = target.model(row.token_ids[None], output_hidden_states=True, use_cache=False).hidden_states
        for place, layer in enumerate(layers):
            ours = row.aux[:, place * hidden : (place + 1) * hidden]
            assert_near(ours, own[layer][0, : len(ours)])
        assert_near(target.normed(row.last), own[depth][0, row.last_at])
        assert not torch.allclose(row.last, own[depth][0, row.last_at], atol=1e-2), "that one is normed"


def assert_near(ours: torch.Tensor, theirs: torch.Tensor) -> None:
    assert ours.shape == theirs.shape and len(ours)
    assert float((ours - theirs).abs().max()) <= NEAR * float(theirs.abs().max())


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return Target.load(TWINS["llama"](tmp_path_factory.mktemp("twin")), dtype="float32", device="cpu")


@pytest.fixture(autouse=True)
def no_waiting_for_the_disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)
    yield


def extraction(directory: Path, batches: int, rows: int, tokens: int) -> Job:
    """Rows of random tokens, the later half of each generated."""
    generator = torch.Generator().manual_seed(0)

    def row(number: int) -> AnswerRow:
        ids = torch.randint(5, 200, (tokens,), generator=generator).tolist()
        return AnswerRow(number, "train", f"{number}", "", ids, [[tokens // 2, tokens]], "length")

    answered = {b: [row(b * rows + place) for place in range(rows)] for b in range(batches)}
    directory.mkdir()
    plan = StatesPlan(str(directory), "f", [0, 2, 4], 64, "float32")
    return Job("extract", "", "float32", "cpu", False, 1, plan, answered=answered)


def unheard(**report: Any) -> None:
    """To whom nobody listens."""


def made(job: Job, target: Target, behind: bool) -> tuple[StateStore, list[dict[str, Any]]]:
    assert job.states is not None
    said, writer = list[dict[str, Any]](), job.states.writer()
    worker._extract(job, target, writer, _Reporter(lambda **report: said.append(report)), behind=behind)
    writer.seal()
    return StateStore(writer.directory), said


def test_written_beside_the_next_pass_it_is_the_same(tmp_path: Path, target: Target) -> None:
    job = extraction(tmp_path / "after", batches=5, rows=3, tokens=30)
    assert job.states is not None
    beside = replace(job, states=replace(job.states, directory=str(tmp_path / "beside")))
    (tmp_path / "beside").mkdir()
    (one, said), (two, told) = made(job, target, behind=False), made(beside, target, behind=True)
    for info in one.info():
        ours, theirs = one.read(info.row), two.read(info.row)
        assert torch.equal(ours.aux, theirs.aux) and torch.equal(ours.last, theirs.last)
    for reports in (said, told):
        done = [report for report in reports if "done" in report]
        assert [report["done"] for report in done] == list(range(5))
        assert all((report["rows"], report["tokens"]) == (3, 90) for report in done)
    order = [
        next(key for key in ("begin", "done") if key in report)
        for report in told
        if "cpu" in report or "begin" in report
    ]
    assert order == ["begin", *["begin", "done"] * 4, "done"]


def test_a_batch_that_cannot_be_written_ends_the_work(
    tmp_path: Path, target: Target, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = extraction(tmp_path / "states", batches=6, rows=1, tokens=20)
    assert job.states is not None
    writer, written = job.states.writer(), []
    write = writer.write_batch

    def full(batch: int, rows: Any) -> None:
        if batch == 2:
            raise PeagleError("the disk is full")
        write(batch, rows)
        written.append(batch)

    monkeypatch.setattr(writer, "write_batch", full)
    with pytest.raises(PeagleError, match="the disk is full"):
        worker._extract(job, target, writer, _Reporter(unheard), behind=True)
    assert written == [0, 1] and writer.sealed_batches() == {0, 1}


@pytest.mark.parametrize("behind", [False, True])
def test_memory_is_flat_over_many_batches(tmp_path: Path, target: Target, behind: bool) -> None:
    """120 batches of 0.5 MB each: what stayed of them would be 60 MB."""
    made(extraction(tmp_path / "warm", batches=20, rows=4, tokens=120), target, behind)
    job = extraction(tmp_path / "states", batches=120, rows=4, tokens=120)
    before = psutil.Process().memory_info().rss
    assert job.states is not None
    worker._extract(job, target, job.states.writer(), _Reporter(unheard), behind=behind)
    assert psutil.Process().memory_info().rss - before < 20e6
