"""prepare, extract and show on a tiny twin. Workers' jobs are done in this process: it is quicker."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

from data_prep import extract as extract_stage
from data_prep import plan as plan_module
from data_prep import prepare as prepare_stage
from data_prep.extract import extract
from data_prep.jobs import Job
from data_prep.prepare import prepare
from data_prep.sampling import Chooser
from data_prep.show import show
from data_prep.workers import split_job
from peagle_train.errors import PeagleError
from peagle_train.run import Run
from peagle_train.stages import StageResult
from peagle_train.store import AnswerRow, AnswerStore, StateStore
from peagle_train.twin.models import tiny_gpt_oss, tiny_llama, tiny_llama3
from tests.data_prep.inline import InlineJobs

RECIPE = """
name: tiny
output: {output}
target: {{model: {target}, dtype: float32, device: cpu}}
data:
  train: {{source: {train}}}
  validation: {{source: {validation}}}
  heldout: {{mine: {{source: {heldout}}}}}
  max_prompt_tokens: 60
  max_new_tokens: 7
  batch_size: 4
  workers: 2
states: {{dtype: float32}}
head: {{layers: 1, aux_layers: [0, 2, 4], mask_token: <repo_name>}}
train: {{steps: 1}}
"""


class Bench:
    """A recipe on disk, a console to read, and a count of the batches that were really worked on."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.jobs = InlineJobs()
        self.rows: list[dict[str, Any]] = []
        tiny_llama(folder / "target", layers=4)
        for name, count in (("train", 9), ("validation", 3), ("heldout", 2)):
            rows = [{"prompt": f"{name} question {'x' * number}"} for number in range(count)]
            rows += [{"prompt": f"{name} {'y' * 90}"}] if name == "train" else []
            self.jsonl(name, rows)
        names = {name: str(folder / f"{name}.jsonl") for name in ("train", "validation", "heldout")}
        self.recipe = folder / "tiny.yaml"
        self.recipe.write_text(RECIPE.format(output=folder / "runs", target=folder / "target", **names))
        self.text = io.StringIO()
        self.console = Console(file=self.text, width=140)

    def jsonl(self, name: str, rows: Sequence[dict[str, Any]]) -> None:
        (self.folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def __call__(self, stage: Callable[[Run, Console], StageResult], *overrides: str) -> StageResult:
        self.jobs.batches.clear()
        with Run.open(self.recipe, overrides, command=["test"]) as run:
            return stage(run, self.console)

    @property
    def answers(self) -> Path:
        return self.folder / "runs/tiny/answers"

    @property
    def states(self) -> Path:
        return self.folder / "runs/tiny/states"


@pytest.fixture
def bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Bench:
    made = Bench(tmp_path)
    monkeypatch.setattr(prepare_stage, "run_jobs", made.jobs)
    monkeypatch.setattr(extract_stage, "run_jobs", made.jobs)
    return made


def test_prepare_keeps_states_and_extract_finds_them(bench: Bench) -> None:
    result = bench(prepare)
    assert not result.skipped and "14 rows, 98 tokens generated" in result.message
    assert sorted(bench.jobs.batches) == [0, 1, 2, 3]
    store, states = AnswerStore(bench.answers), StateStore(bench.states)
    assert {name: count.rows for name, count in store.counts.items()} == {
        "train": 9,
        "validation": 3,
        "mine": 2,
    }
    assert store.index["left_out"]["train"] == {"too long": 1}
    assert "1 too long" in bench.text.getvalue()
    for row in store.rows():
        kept = states.read(row.row)
        assert kept.token_ids.tolist() == row.token_ids
        assert kept.loss_mask.tolist() == row.loss_mask
        assert (kept.set, kept.id, kept.prompt_length) == (row.set, row.id, row.prompt_length)
        assert kept.aux.shape == (len(row.token_ids) - 2, 3 * 64)  # up to the last trainable anchor
        assert kept.last.shape == (row.supervised - 1, 64)
    found = bench(extract)
    assert found.skipped and "14 rows, kept while answering" in found.message and not bench.jobs.batches
    assert bench(prepare).skipped


def test_extract_makes_the_same_states_as_prepare_keeps(bench: Bench) -> None:
    bench(prepare)
    kept = StateStore(bench.states)
    rows = {info.row: kept.read(info.row) for info in kept.info()}
    bench(prepare, "states.keep_while_answering=false", "name=second")
    second = bench.folder / "runs/second/states"
    assert not second.exists()
    bench(extract, "states.keep_while_answering=false", "name=second")
    made = StateStore(second)
    assert len(made) == len(rows)
    for index, row in rows.items():
        again = made.read(index)
        assert torch.equal(again.token_ids, row.token_ids) and torch.equal(again.loss_mask, row.loss_mask)
        torch.testing.assert_close(again.aux, row.aux, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(again.last, row.last, atol=2e-5, rtol=1e-4)


def test_other_aux_layers_are_extracted_without_answering_again(bench: Bench) -> None:
    bench(prepare)
    assert bench(prepare, "head.aux_layers=[1]").skipped
    result = bench(extract, "head.aux_layers=[1]")
    assert not result.skipped and sorted(bench.jobs.batches) == [0, 1, 2, 3]
    assert StateStore(bench.states).aux_layers == [1]


def test_results_do_not_depend_on_the_number_of_workers(bench: Bench) -> None:
    bench(prepare)
    bench(prepare, "data.workers=1", "name=second")
    first, second = AnswerStore(bench.answers), AnswerStore(bench.folder / "runs/second/answers")
    assert first.batches() == second.batches()
    one, two = StateStore(bench.states), StateStore(bench.folder / "runs/second/states")
    assert all(torch.equal(one.read(info.row).aux, two.read(info.row).aux) for info in one.info())
    assert bench(prepare, "data.workers=1").skipped  # and the number is no part of the fingerprint


def test_batches_go_round_the_workers() -> None:
    prompts: Any = {batch: [] for batch in range(7)}
    job = Job("answer", "t", "float32", "cpu", False, None, None, prompts=prompts)
    assert [sorted(part.prompts) for part in split_job(job, 3)] == [[0, 3, 6], [1, 4], [2, 5]]
    assert [part.threads for part in split_job(job, 9)] == [1] * 7


def test_only_missing_batches_are_redone(bench: Bench) -> None:
    bench(prepare)
    before = AnswerStore(bench.answers).batches()
    # As after a kill: one answers batch unsealed, its states sealed, another's states half there.
    for folder in (bench.answers, bench.states):
        (folder / "index.json").unlink()
        record = json.loads((folder / "stage.json").read_text())
        (folder / "stage.json").write_text(json.dumps({**record, "finished": None, "seconds": None}))
    for name in ("batch-00002.jsonl", "batch-00003.jsonl"):
        (bench.answers / name).unlink()
    (bench.states / "batch-00003.json").unlink()
    (bench.states / ".batch-00003.safetensors.77.partial").write_bytes(b"half")
    result = bench(prepare)
    assert not result.skipped and sorted(bench.jobs.batches) == [2, 3]
    assert AnswerStore(bench.answers).batches() == before
    assert len(StateStore(bench.states)) == 14
    assert not list(bench.states.glob(".*.partial"))


def test_a_changed_prompt_file_is_never_answered_from_the_old_store(bench: Bench) -> None:
    bench(prepare)
    bench.jsonl("heldout", [{"prompt": "another question"}])
    result = bench(prepare)
    assert not result.skipped
    assert {row.prompt for row in AnswerStore(bench.answers).rows("mine")} == {"another question"}
    assert len(list(bench.answers.parent.glob("answers.old-*"))) == 1


def test_the_day_and_the_variables_of_the_template_are_the_recipes(bench: Bench) -> None:
    tiny_gpt_oss(bench.folder / "harmony")
    own = [f"target.model={bench.folder / 'harmony'}", "head.mask_token=unused", "data.max_prompt_tokens=200"]
    with pytest.raises(PeagleError, match=r"asks for today's date.*data\.date=YYYY-MM-DD"):
        bench(prepare, *own)
    assert not list(bench.answers.glob("batch-*"))
    dated = [*own, "data.date=2025-06-28"]
    bench(prepare, *dated)
    first = AnswerStore(bench.answers).rows()
    assert bench(prepare, *dated).skipped
    for change in ("data.date=2025-06-29", "data.template_variables={reasoning_effort: low}"):
        assert not bench(prepare, *dated, change).skipped
        rows = AnswerStore(bench.answers).rows()
        assert all(old.token_ids != new.token_ids for old, new in zip(first, rows, strict=True))


def test_an_end_token_is_no_mask_token(bench: Bench) -> None:
    tiny_llama3(bench.folder / "llama3")
    own = [f"target.model={bench.folder / 'llama3'}", "data.date=2025-06-28", "data.max_prompt_tokens=200"]
    with pytest.raises(PeagleError, match=r"ends an answer.*<\|reserved_special_token_0\|> \(266\)"):
        bench(prepare, *own, "head.mask_token=<|end_of_text|>")
    assert not bench(prepare, *own, "head.mask_token=<|reserved_special_token_0|>").skipped


def test_a_full_disk_is_refused_before_anything_is_written(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(plan_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(PeagleError, match=r"needs up to .* but the disk has 1\.0 kB free"):
        bench(prepare)
    assert not list(bench.answers.glob("batch-*")) and not bench.jobs.batches


def test_show_marks_exactly_the_supervised_tokens(bench: Bench) -> None:
    with pytest.raises(PeagleError, match=r"run `peagle prepare .*tiny\.yaml`"):
        bench(lambda run, console: show(run, 2, console))  # type: ignore[arg-type, return-value]
    bench(prepare)
    bench.text.seek(0)
    bench.text.truncate()
    bench(lambda run, console: show(run, 3, console))  # type: ignore[arg-type, return-value]
    text = bench.text.getvalue()
    assert [line.split()[4] for line in text.splitlines() if line.startswith("--- row")] == [
        "train",
        "validation",
        "mine",
    ]
    row = AnswerStore(bench.answers).rows("train")[0]
    assert f"{len(row.token_ids)} tokens, 7 supervised, spans {row.spans}, finish length" in text
    ids = text.split("ids: ")[1].split("\n")[0].split()
    assert [token.startswith("*") for token in ids] == row.loss_mask
    assert [int(token.lstrip("*")) for token in ids] == row.token_ids
    assert "assistant\n>>" in text


def talkative(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the twin write text alone, and end its turn soon."""
    choose = Chooser.choose

    def without_marks(self: Chooser, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        logits = logits.clone()
        logits[:, [0, 1, 3, 4, *range(109, logits.shape[1])]] = -torch.inf  # marks, rows without a token
        logits[:, [2, 76, 88]] += 3  # <|im_end|>, h, t
        return choose(self, logits, rows)

    monkeypatch.setattr(Chooser, "choose", without_marks)


@pytest.fixture
def talking(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """Training conversations of one to three questions, and two rows that come with their tokens."""
    talkative(monkeypatch)
    rows: list[dict[str, Any]] = []
    for number in range(12):
        rows.append({"messages": dialog(number), "id": number})
    bench.rows = rows
    bench.jsonl("train", [*rows, *GIVEN])
    return bench


GIVEN: list[dict[str, Any]] = [
    {"id": "g1", "token_ids": [1, 40, 41, 2, 9, 1, 50, 51, 52, 2], "loss_mask": [0] * 6 + [1] * 4},
    {"id": "g2", "token_ids": [1, 40, 42, 2, 60, 2, 9, 61, 62], "loss_mask": [0, 0, 0, 0, 1, 1, 0, 1, 1]},
]
EACH = ["data.turns=each", "data.max_new_tokens=12", "data.max_prompt_tokens=150", "data.batch_size=5"]
HOT = [*EACH, "data.sampling=[{temperature: 1.0, top_p: 0.9, weight: 3}, {temperature: 0.0}]"]


def dialog(number: int) -> list[dict[str, str]]:
    turns = [{"role": "user", "content": f"question {number}"}]
    for later in range(number % 3):
        turns += [{"role": "assistant", "content": "no"}, {"role": "user", "content": f"more {later}"}]
    return turns


def test_conversations_are_answered_turn_by_turn(talking: Bench) -> None:
    talking(prepare, *EACH)
    store = AnswerStore(talking.answers)
    rows = store.rows("train")
    by_id: dict[str, list[AnswerRow]] = {}
    for row in rows:
        by_id.setdefault(row.id, []).append(row)
    assert len(by_id) == 14 and max(len(row.spans) for row in rows) == 3
    later = sum(count for reason, count in store.index["left_out"]["train"].items() if "later" in reason)
    asked = {f"train:{number}": 1 + number % 3 for number in range(12)}
    spans = {id: sum(len(row.spans) for row in mine) for id, mine in by_id.items() if id in asked}
    assert sum(asked.values()) - sum(spans.values()) == later
    assert later > 0
    printed = " ".join(talking.text.getvalue().split())
    assert f"{later} later turns: cut at max_new_tokens" in printed
    tokenizer = AutoTokenizer.from_pretrained(talking.folder / "target")
    for row in rows:
        text = tokenizer.decode(row.token_ids)
        assert "no<|im_end|>" not in text  # what the data recorded is not what was said
    given = {row.id: row for row in rows if row.id in ("train:g1", "train:g2")}
    assert given["train:g1"].loss_mask == [False] * 6 + [True] * 4
    assert given["train:g2"].spans == [[4, 6], [7, 9]]
    numbers = [row.row for row in store.rows()]
    assert len(set(numbers)) == len(numbers)


@pytest.mark.parametrize("anew", [False, True])
def test_states_kept_in_the_same_pass_are_those_of_the_rows(talking: Bench, anew: bool) -> None:
    """Of several turns in a row, of rows begun anew, of rows that came with their tokens."""
    if anew:  # history is not what was generated
        template = talking.folder / "target" / "chat_template.jinja"
        template.write_text(
            template.read_text().replace("message['content']", "(message['content'] | upper)")
        )
    talking(prepare, *EACH)
    kept = StateStore(talking.states)
    rows = AnswerStore(talking.answers).rows("train")
    assert (len({row.id for row in rows}) < len(rows)) == anew
    assert max(len(row.spans) for row in rows) > 1
    assert len(kept) == len(AnswerStore(talking.answers).rows())
    second = [*EACH, "states.keep_while_answering=false", "name=second"]
    talking(prepare, *second)
    talking(extract, *second)
    made = StateStore(talking.folder / "runs/second/states")
    assert AnswerStore(talking.folder / "runs/second/answers").rows() == AnswerStore(talking.answers).rows()
    for info in kept.info():
        ours, again = kept.read(info.row), made.read(info.row)
        assert torch.equal(ours.token_ids, again.token_ids) and torch.equal(ours.loss_mask, again.loss_mask)
        torch.testing.assert_close(ours.aux, again.aux, atol=2e-5, rtol=1e-4)
        torch.testing.assert_close(ours.last, again.last, atol=2e-5, rtol=1e-4)


def test_sampled_conversations_go_on_after_a_kill_with_the_input_reshuffled(talking: Bench) -> None:
    talking(prepare, *HOT)
    before = AnswerStore(talking.answers).batches()
    temperatures = {row.set: set() for batch in before for row in batch}
    for row in (row for batch in before for row in batch):
        temperatures[row.set].add(row.temperature)
    assert temperatures == {"train": {0.0, 1.0}, "validation": {0.0}, "mine": {0.0}}
    for folder in (talking.answers, talking.states):
        (folder / "index.json").unlink()
        record = json.loads((folder / "stage.json").read_text())
        (folder / "stage.json").write_text(json.dumps({**record, "finished": None, "seconds": None}))
    (talking.answers / "batch-00001.jsonl").unlink()
    talking.jsonl("train", [*GIVEN, *talking.rows[::-1]])
    result = talking(prepare, *HOT)
    assert not result.skipped and talking.jobs.batches == [1]
    assert AnswerStore(talking.answers).batches() == before
    talking(prepare, *HOT, "name=other")
    assert AnswerStore(talking.folder / "runs/other/answers").batches() == before
    talking(prepare, *HOT, "name=seeded", "seed=1")
    seeded = AnswerStore(talking.folder / "runs/seeded/answers").rows()
    first = sorted((row for batch in before for row in batch), key=lambda row: row.row)
    assert [row.token_ids for row in seeded] != [row.token_ids for row in first]
    greedy = {row.id: row.token_ids for row in first if not row.temperature and row.set != "train"}
    assert {row.id: row.token_ids for row in seeded if row.id in greedy} == greedy


def test_answers_depend_on_the_seed_only_where_tokens_are_drawn(talking: Bench) -> None:
    talking(prepare, *EACH)
    assert talking(prepare, *EACH, "seed=1").skipped
    talking(prepare, *HOT)
    assert not talking(prepare, *HOT, "seed=1").skipped


def test_a_format_that_cannot_be_read_back_is_refused_before_anything_is_asked(talking: Bench) -> None:
    template = talking.folder / "target" / "chat_template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    with pytest.raises(PeagleError, match=r"its chat format is none of .*set data\.turns: last"):
        talking(prepare, *EACH)
    assert not talking.jobs.batches
    assert not talking(prepare).skipped
