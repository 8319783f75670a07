"""Rows from wherever they lie, in whatever form: the same prompts, bad rows counted, nothing guessed."""

from __future__ import annotations

import gzip
import json
import random
import re
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fsspec
import pyarrow
import pyarrow.parquet
import pytest

from data_prep.prompts import Message, Prompt, Rejects, collect, sources_fingerprint
from data_prep.prompts.base import split_of
from data_prep.prompts.collect import prompts_of, shares
from data_prep.prompts.contamination import WORDS, Benchmarks
from data_prep.prompts.presets import PRESETS, spelled_out
from data_prep.prompts.shapes import BadRowError, prompt_of
from peagle_train.errors import PeagleError
from peagle_train.recipe.data import DataSection, MixPart, PromptSet

ROWS = [{"prompt": f"What is {n} times {n}?"} for n in range(40)]


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text(lines(rows))
    return path


def read(source: object, **keys: Any) -> list[Prompt]:
    rejects = Rejects()
    found = list(prompts_of(MixPart(source=str(source), **keys), "last", rejects))
    assert rejects.total == 0
    return found


def data(train: PromptSet, **more: Any) -> DataSection:
    return DataSection(
        train=train,
        validation=PromptSet(source="stdlib", split="validation", count=5),
        heldout=more.pop("heldout", {"stdlib": PromptSet(source="stdlib", split="heldout", count=5)}),
        **more,
    )


@pytest.fixture
def everywhere(tmp_path: Path, s3: str) -> Iterator[list[str]]:
    """The same rows as each kind of source."""
    half = len(ROWS) // 2
    (tmp_path / "folder" / "deep").mkdir(parents=True)
    write(tmp_path / "rows.jsonl", ROWS)
    (tmp_path / "rows.jsonl.gz").write_bytes(gzip.compress(lines(ROWS).encode()))
    (tmp_path / "rows.json").write_text(json.dumps(ROWS, indent=1))
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "rows.parquet")
    write(tmp_path / "folder" / "a.jsonl", ROWS[half:])
    write(tmp_path / "folder" / "deep" / "b.jsonl", ROWS[:half])
    (tmp_path / "folder" / "readme.txt").write_text("not rows")
    memory = fsspec.filesystem("memory")
    memory.pipe_file("/bucket/rows.jsonl", lines(ROWS).encode())
    fsspec.filesystem("s3").pipe_file(f"{s3}/rows.jsonl", lines(ROWS).encode())
    names = ["rows.jsonl", "rows.jsonl.gz", "rows.json", "rows.parquet", "folder", "folder/**/*.jsonl"]
    urls = ["memory://bucket/rows.jsonl", "memory://bucket", f"{s3}/*.jsonl", s3]
    yield [*(str(tmp_path / name) for name in names), *urls]
    memory.rm("/bucket", recursive=True)


def test_every_kind_of_source_gives_the_same_prompts_in_the_same_order(everywhere: list[str]) -> None:
    taken = []
    for source in everywhere:
        (part,) = collect(data(PromptSet(source=source, split="train", count=7)))["train"]
        taken.append([prompt.messages for prompt in part.prompts[:7]])
    assert taken[1:] == taken[:-1] and len(set(taken[0])) == 7


def test_the_same_rows_have_the_same_fingerprint(everywhere: list[str], tmp_path: Path) -> None:
    marks = [sources_fingerprint(data(PromptSet(source=source)))[source] for source in everywhere]
    assert len(set(marks)) == 1
    other = write(tmp_path / "other.jsonl", [*ROWS[:-1], {"prompt": "other"}])
    assert sources_fingerprint(data(PromptSet(source=str(other))))[str(other)] != marks[0]


def test_reshuffled_rows_give_the_same_prompts(tmp_path: Path) -> None:
    rows = [*ROWS, ROWS[3], ROWS[9]]
    sets = []
    for seed in range(3):
        random.Random(seed).shuffle(rows)
        path = write(tmp_path / f"rows-{seed}.jsonl", rows)
        section = PromptSet(source=str(path), split="train", count=9)
        (part,) = collect(data(section))["train"]
        sets.append([prompt.messages for prompt in part.prompts])
        assert part.repeats == sum(split_of(ROWS[n]["prompt"]) == "train" for n in (3, 9))
    assert sets[0] == sets[1] == sets[2]


def test_a_large_file_is_read_in_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "many.jsonl"
    with path.open("w") as file:
        for n in range(20_000):
            file.write(json.dumps({"prompt": f"{n} " + "word " * 60}) + "\n")
    tracemalloc.start()
    (part,) = collect(data(PromptSet(source=str(path), split="train", count=100)))["train"]
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(part.prompts) == 1200 and peak < path.stat().st_size


@pytest.mark.parametrize(
    ("row", "keys", "messages"),
    [
        ({"prompt": "A"}, {}, [Message("user", "A")]),
        (
            {"q": "A", "s": "B"},
            {"columns": {"prompt": "q", "system": "s"}},
            [Message("system", "B"), Message("user", "A")],
        ),
        (
            {
                "conversations": [
                    {"from": "human", "value": "A"},
                    {"from": "gpt", "value": "B"},
                    {"from": "human", "value": "C"},
                    {"from": "gpt", "value": "D"},
                ]
            },
            {"columns": {"messages": "conversations"}, "roles": {"human": "user", "gpt": "assistant"}},
            [Message("user", "A"), Message("assistant", "B"), Message("user", "C")],
        ),
        (
            {
                "messages": [
                    {
                        "role": "developer",
                        "content": [{"type": "text", "text": "A"}, {"type": "text", "text": "B"}],
                    },
                    {"role": "user", "content": "C"},
                    {
                        "role": "assistant",
                        "content": None,
                        "reasoning_content": "D",
                        "tool_calls": [{"function": {"name": "f", "arguments": '{"x": 1}'}}],
                    },
                    {"role": "tool", "name": "f", "content": "E"},
                ]
            },
            {"roles": {"developer": "system"}},
            [
                Message("system", "AB"),
                Message("user", "C"),
                Message("assistant", "", "D", ({"name": "f", "arguments": {"x": 1}},)),
                Message("tool", "E", name="f"),
            ],
        ),
    ],
)
def test_rows_of_every_shape(row: dict[str, Any], keys: dict[str, Any], messages: list[Message]) -> None:
    assert list(prompt_of(row, MixPart(source="x", **keys), "x").messages) == messages


def test_tools_and_tokens_come_along() -> None:
    tool = {"name": "f", "parameters": {"type": "object"}}
    for tools in ([tool], json.dumps([tool])):
        prompt = prompt_of({"prompt": "A", "tools": tools}, MixPart(source="x"), "x")
        assert prompt.tools == (tool,)
    row = {"token_ids": [5, 6, 7, 8, 9, 5], "loss_mask": [0, 0, 1, 1, 0, 1], "id": 4}
    prompt = prompt_of(row, MixPart(source="x"), "x")
    assert prompt.answered is not None and prompt.id == "x:4"
    assert (prompt.answered.token_ids, prompt.answered.spans) == ((5, 6, 7, 8, 9, 5), ((2, 4), (5, 6)))


def test_several_user_turns_in_a_row_need_each() -> None:
    row: dict[str, Any] = {"prompt": ["A", "B"]}
    assert len(prompt_of(row, MixPart(source="x"), "x", "each").messages) == 2
    assert prompt_of(row, MixPart(source="x"), "x").messages == (Message("user", "A"),)
    row = {"messages": [{"role": "user", "content": text} for text in "AB"]}
    assert len(prompt_of(row, MixPart(source="x"), "x", "each").messages) == 2
    with pytest.raises(BadRowError, match=r"turn 1 is the user's right after turn 0.*data\.turns: each"):
        prompt_of(row, MixPart(source="x"), "x")


BAD = [
    ("{not json", "not JSON"),
    ('["a"]', "found list, expected an object"),
    ('{"text": "x"}', "expected either `prompt` or `messages`"),
    ('{"prompt": "x", "messages": []}', "found both"),
    ('{"prompt": "  "}', "text that is not empty"),
    ('{"prompt": 3}', "text that is not empty"),
    ('{"prompt": "x", "id": [1]}', "`id` is"),
    ('{"messages": []}', "not empty, found"),
    ('{"messages": [{"role": "bot", "content": "x"}]}', "role 'bot'; .* roles: {bot: user}"),
    ('{"messages": [{"role": "assistant", "content": "y"}]}', "no user turn"),
    ('{"prompt": "x", "messages": null}', "found both"),
    ('{"messages": [{"role": "user", "content": [{"type": "image"}]}]}', "parts of kind image"),
    (
        '{"messages": [{"role": "user", "content": "x"}, {"role": "system", "content": "y"}]}',
        "turn 1 has role",
    ),
    ('{"prompt": "x", "tools": "{"}', "`tools` is no JSON"),
    ('{"token_ids": [1, 2], "loss_mask": [0]}', "of the same length"),
    ('{"token_ids": [1, 2], "loss_mask": [0, 0]}', "marks no token"),
    ('{"token_ids": [1, 2], "loss_mask": [1, 1]}', "the very first"),
]


@pytest.mark.parametrize(("row", "message"), BAD)
def test_a_bad_row_is_quoted_with_file_and_line(tmp_path: Path, row: str, message: str) -> None:
    path, file = tmp_path / "own.jsonl", tmp_path / "rejects.jsonl"
    path.write_text('{"prompt": "fine"}\n\n' + row + "\n")
    rejects = Rejects(file, 0.5)
    assert len(list(prompts_of(MixPart(source=str(path)), "last", rejects))) == 1
    rejects.close()
    (quote,) = map(json.loads, file.read_text().splitlines())
    assert quote["where"] == f"{path}:3" and quote["row"] == row
    assert re.search(message, quote["why"])


def test_too_many_bad_rows_end_the_run_with_the_first_quotes(tmp_path: Path) -> None:
    path = tmp_path / "own.jsonl"
    path.write_text(lines(ROWS) + "".join(f"bad {n}\n" for n in range(5)))
    rejects = Rejects(tmp_path / "rejects.jsonl", 0.1)
    list(prompts_of(MixPart(source=str(path)), "last", rejects))
    with pytest.raises(PeagleError) as error:
        rejects.close()
    text = str(error.value)
    assert "5 of 45 rows are bad, more than the 10 % of data.max_rejects" in text
    assert f"{path}:41: not JSON" in text and f"{path}:44" not in text and "rejects.jsonl" in text


def test_a_column_that_is_not_there_is_named(tmp_path: Path) -> None:
    rejects = Rejects(None, 0.1)
    part = MixPart(source=str(write(tmp_path / "own.jsonl", ROWS)), columns={"prompt": "question"})
    assert not list(prompts_of(part, "last", rejects))
    with pytest.raises(PeagleError, match="has no column question, which `columns` of the recipe names"):
        rejects.close()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none.jsonl", "no such file, nor a folder or glob"),
        ("*.jsonl", "no such file, nor a folder or glob"),
        ("empty", "no such file, nor a folder or glob"),
        ("rows.csv", "found another kind of file"),
        ("nothing.jsonl", "holds no rows"),
        ("list.json", "begins as a list but is not JSON"),
        ("bad.parquet", "not readable as Parquet"),
        ("what://a", "no URL that fsspec knows"),
    ],
)
def test_a_source_that_is_none_is_explained(tmp_path: Path, source: str, message: str) -> None:
    (tmp_path / "empty").mkdir()
    for name, text in (
        ("rows.csv", "a"),
        ("nothing.jsonl", "\n"),
        ("list.json", "[{]"),
        ("bad.parquet", "x"),
    ):
        (tmp_path / name).write_text(text)
    place = source if "://" in source else tmp_path / "x" / source if "*" in source else tmp_path / source
    with pytest.raises(PeagleError, match=message):
        read(place)


@pytest.mark.parametrize(
    ("count", "weights", "found"),
    [
        (10, [1.0, 1.0], [5, 5]),
        (10, [2.0, 1.0], [7, 3]),
        (7, [1.0, 1.0, 1.0], [3, 2, 2]),
        (1000, [0.5, 0.3, 0.2], [500, 300, 200]),
        (None, [1.0, 1.0], [None, None]),
    ],
)
def test_a_mix_is_exact_to_a_row(count: int | None, weights: list[float], found: list[int | None]) -> None:
    mix = [MixPart(source=f"{n}.jsonl", weight=weight) for n, weight in enumerate(weights)]
    assert shares(PromptSet(mix=mix, count=count), "train") == found


def test_a_mix_that_means_nothing_is_refused() -> None:
    mix = [MixPart(source="a.jsonl", weight=3.0), MixPart(source="b.jsonl")]
    with pytest.raises(PeagleError, match=r"data\.train\.count: missing beside a mix with weights"):
        shares(PromptSet(mix=mix), "train")
    with pytest.raises(PeagleError, match=r"2 prompts leave none for 'b\.jsonl'"):
        shares(PromptSet(mix=[mix[0].model_copy(update={"weight": 9.0}), mix[1]], count=2), "train")


def test_a_mix_takes_from_each_of_its_parts(tmp_path: Path) -> None:
    first = write(tmp_path / "a.jsonl", ROWS)
    second = write(tmp_path / "b.jsonl", [{"q": f"Who wrote book {n}?"} for n in range(40)])
    mix = [MixPart(source=str(first), weight=3.0), MixPart(source=str(second), columns={"prompt": "q"})]
    parts = collect(data(PromptSet(mix=mix, split="train", count=8)))["train"]
    assert [part.count for part in parts] == [6, 2]
    assert all("times" in prompt.text for prompt in parts[0].prompts)
    assert all("book" in prompt.text for prompt in parts[1].prompts)


def test_benchmark_text_is_kept_out_of_training(tmp_path: Path) -> None:
    known = " ".join(f"w{n}" for n in range(WORDS + 2))
    bench = write(tmp_path / "bench.jsonl", [{"prompt": known}, {"prompt": "Name three Lakes."}])
    rows = [
        {"prompt": "before " + known.upper().replace(" ", ", ") + " after"},
        {"prompt": " ".join(known.split()[: WORDS - 1])},
        {"prompt": "Please name three lakes"},
        {"prompt": "Name three rivers"},
    ]
    own = write(tmp_path / "own.jsonl", rows)
    section = data(
        PromptSet(source=str(own)),
        decontaminate=[str(bench)],
        heldout={"bench": PromptSet(source=str(bench))},
    )
    found = collect(section)
    assert {prompt.text for prompt in found["train"][0].prompts} == {rows[1]["prompt"], rows[3]["prompt"]}
    assert found["train"][0].contaminated == 2
    assert len(found["bench"][0].prompts) == 2  # what is reported on stays
    assert str(bench) in sources_fingerprint(section)


def test_humaneval_is_known_as_a_benchmark() -> None:
    from data_prep.prompts import humaneval

    prompts = humaneval.load()
    benchmarks = Benchmarks(prompt.text for prompt in prompts[:100])
    assert all(benchmarks.hold(prompt.text) for prompt in prompts[:100])
    assert sum(benchmarks.hold(prompt.text) for prompt in prompts[100:]) < 10


def test_presets_spell_out_what_a_recipe_would_say() -> None:
    part = spelled_out(MixPart(source="ultrachat", weight=2.0, revision="a" * 40))
    assert part.source == "hub:HuggingFaceH4/ultrachat_200k" and part.part == "train_sft"
    assert (part.weight, part.revision) == (2.0, "a" * 40)
    for name, preset in PRESETS.items():
        assert preset.keys.source.startswith("hub:") and preset.keys.part and preset.licence, name


def test_the_hub_is_streamed_by_datasets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`datasets` reads a folder as it reads the Hub: only the name differs; a folder has no revision."""
    write(tmp_path / "train.jsonl", [{"question": row["prompt"]} for row in ROWS])
    import datasets

    real = datasets.load_dataset
    seen: dict[str, Any] = {}

    def local(name: str, subset: str | None, *, split: str, revision: str, streaming: bool) -> Any:
        seen.update(name=name, subset=subset, split=split, revision=revision, streaming=streaming)
        return real(str(tmp_path), split=split, streaming=streaming)

    monkeypatch.setattr(datasets, "load_dataset", local)
    section = PromptSet(source="gsm8k", revision="b" * 40, split="train", count=5)
    (part,) = collect(data(section))["train"]
    assert seen == {
        "name": "openai/gsm8k",
        "subset": "main",
        "split": "train",
        "revision": "b" * 40,
        "streaming": True,
    }
    assert {prompt.text for prompt in part.prompts} <= {row["prompt"] for row in ROWS} and len(
        part.prompts
    ) > 5
    assert sources_fingerprint(data(section))["hub:openai/gsm8k"] == "b" * 40


def test_a_hub_that_cannot_be_reached_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(PeagleError, match="found no `part`"):
        read("hub:a/b", revision="c" * 40)
    with pytest.raises(PeagleError, match="cannot be read from the Hub"):
        read("hub:a/b", part="train")
