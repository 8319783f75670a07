"""The ablation: its variants, what it calls better, resuming, and the set that it must not look at."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from rich.console import Console
from torch import Tensor

from peagle_train import PeagleError, Run
from peagle_train.files import read_json, write_json
from peagle_train.head.io import load_head
from peagle_train.store.states import StateStore
from scripts.ablate import __main__ as command
from scripts.ablate import report
from scripts.ablate.bench import Bench
from scripts.ablate.choose import combined, measured, winners
from scripts.ablate.grid import BASE, Source, Variant, only, variants
from scripts.ablate.job import HEAD, RESULT, Job, fingerprint_of, train
from scripts.ablate.work import in_words, seconds_left, work
from tests.recipe.test_checks import FACTS
from tests.training.conftest import recipe as recipe  # a fixture

QUIET = Console(quiet=True)
SMOLLM2 = str(Path(__file__).parents[1] / "recipes" / "smollm2.yaml")
TARGET = replace(FACTS, num_layers=30, hidden_size=576, vocab_size=49152, max_position_embeddings=8192)
SOURCE = Source(SMOLLM2, (), TARGET)


def planted(lengths: list[float]) -> Tensor:
    """[prompts, 2] with 10 drafts a prompt and these acceptance lengths."""
    return torch.tensor([[10.0, 10 * (value - 1)] for value in lengths], dtype=torch.float64)


def a_result(job: Job, counts: Tensor) -> dict[str, Any]:
    """What a training leaves, as far as others read it."""
    numbers = {"steps": 7, "k": 5, "wall_seconds": job.seconds + 10}
    return {**asdict(job), **numbers, "counts": counts.tolist()}


def a_job(folder: Path, name: str) -> Job:
    return Job(name, str(folder / name), "", [], "", "", 0, 120.0, "stdlib", False, f"print of {name}")


# --- the grid


def test_every_variant_is_a_valid_recipe_that_differs_from_the_base_in_its_keys_alone() -> None:
    grid, base = variants(SOURCE), SOURCE.recipe().model_dump()
    assert len({variant.name for variant in grid}) == len(grid)
    for variant in grid:
        changed = SOURCE.recipe(variant.overrides).model_dump()
        assert changed != base, variant.name
        for override in variant.overrides:
            *sections, key = override.partition("=")[0].split(".")
            here, there = changed, base
            for section in sections:
                here, there = here[section], there[section]
            here[key] = there[key]
        assert changed == base, variant.name


def test_what_the_issue_names_is_in_the_grid_and_the_bases_own_values_are_not() -> None:
    found: dict[str, list[str]] = {}
    for variant in variants(SOURCE):
        found.setdefault(variant.group, []).append(variant.name)
    assert found["layers"] == ["layers=2", "layers=4"]
    assert found["batch"] == ["batch_tokens=92", "batch_tokens=368", "batch_tokens=736"]
    assert found["rate"] == ["rate=0.6", "rate=0.8", "rate=1.0"] and found["floor"] == ["floor=0.2"]
    assert found["k"] == ["positions=3", "positions=8"] and found["loss"] == ["loss=ce"]
    assert found["vocabulary"] == [f"draft_vocab_size={n}" for n in ("8192", "16384", "all")]
    assert found["embeddings"] == ["embeddings=own"] and found["output"] == ["output=frozen"]
    assert found["initialise"] == ["initialise=random"]


def test_k_is_five_or_all_that_a_head_has() -> None:
    k = {v.name: SOURCE.recipe(v.overrides).evaluate.k for v in variants(SOURCE) if v.group == "k"}
    assert k == {"positions=3": 3, "positions=8": 5}


def test_another_base_keeps_the_grid_valid() -> None:
    frozen = replace(SOURCE, overrides=("head.output=frozen", "head.layers=2"))
    found = {v.name: v.overrides for v in variants(frozen)}
    assert "layers=1" in found and "layers=2" not in found and "output=trained" in found
    assert found["initialise=random"] == ("head.initialise=random", "head.output=trained")


def test_a_group_that_does_not_exist_is_named() -> None:
    grid = variants(SOURCE)
    assert {v.group for v in only(grid, ["layers", "k"])} == {"layers", "k"}
    with pytest.raises(PeagleError, match="--only: found depth; expected some of initialise, batch"):
        only(grid, ["layers", "depth"])


# --- what is better


def test_a_gain_is_paired_prompt_by_prompt() -> None:
    """Prompts differ by far more than the heads do; over the same prompts the gain has no spread at all."""
    base = planted([1.1, 2.9] * 50)
    m = measured([base + torch.tensor([0.0, 0.5])], [base])
    assert m.length == pytest.approx(2.05) and m.gain == pytest.approx(0.05)
    assert m.gain_between == pytest.approx((0.05, 0.05)) and m.better and not m.worse
    assert m.between[1] - m.between[0] > 0.3


def test_a_gain_within_chance_is_none() -> None:
    """Half of the prompts gain 1.0, half lose 0.9: the mean of 100 varies with about 0.95 / sqrt(100)."""
    base, other = planted([2.0] * 100), planted([3.0, 1.1] * 50)
    m = measured([other], [base])
    assert m.gain == pytest.approx(0.05) and not m.better and not m.worse
    assert m.gain_between[0] == pytest.approx(0.05 - 1.96 * 0.095, abs=0.02)
    assert m.gain_between[1] == pytest.approx(0.05 + 1.96 * 0.095, abs=0.02)


def test_a_gain_must_stand_with_every_seed() -> None:
    base = planted([1.5] * 100)
    ups, downs = planted([1.8] * 100), planted([1.4] * 100)
    m = measured([ups, downs], [base, base])
    assert m.gain == pytest.approx(0.1) and m.gain_between[0] > 0
    assert m.by_seed == pytest.approx((0.3, -0.1)) and not m.better
    assert measured([downs, downs], [base, base]).worse


def test_the_winner_of_a_group_gains_most_and_groups_without_one_have_none() -> None:
    """K's group never has one."""
    base = planted([1.5] * 100)
    plan = {"a=1": 1.6, "a=2": 1.7, "b=1": 1.4, "c=1": 1.9, "k=1": 1.9}
    grid = [Variant(name[0], name) for name in plan]
    results = {name: measured([planted([value] * 100)], [base]) for name, value in plan.items()}
    assert [v.name for v in winners(grid, results)] == ["c=1", "a=2"]


def test_a_combination_leaves_out_what_does_not_go_with_better_ones() -> None:
    chosen = [
        Variant("output", "output=frozen", ("head.output=frozen",)),
        Variant("initialise", "initialise=random", ("head.initialise=random",)),
        Variant("layers", "layers=2", ("head.layers=2",)),
    ]
    combination, left = combined(SOURCE, chosen)
    assert combination.overrides == ("head.output=frozen", "head.layers=2")
    assert [v.name for v in left] == ["initialise=random"]


# --- work that goes on


def test_an_interrupted_run_goes_on_and_trains_nothing_twice(tmp_path: Path) -> None:
    jobs, trained = [a_job(tmp_path, name) for name in "abcd"], list[str]()

    def run(job: Job) -> None:
        if job.name == "c" and trained.count("c") == 0:
            trained.append("c")
            raise PeagleError("c ended with status 9")
        trained.append(job.name)
        write_json(Path(job.directory) / RESULT, a_result(job, planted([1.5])))

    with pytest.raises(PeagleError, match="c ended"):
        work(jobs, 1, QUIET, run)
    kept = [job.name for job in jobs if job.done()]
    assert kept[:2] == ["a", "b"] and "c" not in kept
    results = work(jobs, 2, QUIET, run)
    assert [result["name"] for result in results] == list("abcd")
    assert sorted(trained) == ["a", "b", "c", "c", "d"]
    again = len(trained)
    work(jobs, 2, QUIET, run)
    assert len(trained) == again


def test_what_is_left_follows_what_was_measured(tmp_path: Path) -> None:
    jobs = [a_job(tmp_path, name) for name in "abcde"]
    assert seconds_left(jobs, 2) == pytest.approx(5 * 150 / 2)
    write_json(Path(jobs[0].directory) / RESULT, a_result(jobs[0], planted([1.5])))  # 10 s beside training
    assert seconds_left(jobs, 2) == pytest.approx(4 * 130 / 2)
    assert [in_words(s) for s in (40, 700, 3900)] == ["40 s", "12 min", "1 h 05 min"]


def test_a_result_of_other_inputs_is_not_taken() -> None:
    given: dict[str, Any] = dict(states="s", seed=0, seconds=120.0, measure="stdlib", code="c")
    names = [fingerprint_of(SOURCE.recipe(), **given)]
    for change in ({"states": "t"}, {"seed": 1}, {"seconds": 60.0}, {"measure": "other"}, {"code": "d"}):
        names.append(fingerprint_of(SOURCE.recipe(), **{**given, **change}))
    names.append(fingerprint_of(SOURCE.recipe(["train.cod.rate=0.7"]), **given))
    names.append(fingerprint_of(SOURCE.recipe(["evaluate.k=4"]), **given))
    assert len(set(names)) == len(names)
    assert fingerprint_of(SOURCE.recipe(["name=other", "export.dtype=float16"]), **given) == names[0]


def test_a_real_training_by_the_clock(recipe: Path, tmp_path: Path) -> None:
    with Run.open(recipe, write=False) as run:
        store = StateStore(run.states_dir)
    job = Job(
        name="rate=0.5",
        directory=str(tmp_path / "job"),
        recipe=str(recipe),
        overrides=["train.accumulate=1", "train.cod.rate=0.5"],
        states=str(run.states_dir),
        target=str(recipe.parent / "target"),
        seed=1,
        seconds=0.2,
        measure="sums",
        keep=True,
        fingerprint="f",
    )
    train(job)
    result = job.done()
    assert result is not None and result["steps"] > 0 and 0.2 <= result["cpu_seconds"] < 2
    assert len(result["counts"]) == len(store.info("sums")) and result["k"] == 4
    assert load_head(tmp_path / "job" / HEAD).config.draft_vocab_size == 64
    with pytest.raises(PeagleError, match=r"train\.accumulate: found 2; expected 1"):
        train(replace(job, overrides=[]))


# --- the command


@pytest.fixture
def bench(tmp_path: Path) -> Bench:
    store = SimpleNamespace(directory=tmp_path, info=lambda name: [None] * 100)
    return Bench(
        source=SOURCE,
        store=cast(StateStore, store),
        states="s",
        target=tmp_path,
        output=tmp_path / "out",
        seeds=(0, 1),
        seconds=120.0,
        choose="stdlib",
        final="humaneval",
        code="c",
    )


LENGTHS = {BASE: 1.5, "layers=2": 1.6, "layers=4": 1.55, "combination": 1.62}
SECOND = {"base": 1.5, "combination": 1.4}
"""On the second set the winners lose: what is chosen must not notice."""


def options(*arguments: str) -> argparse.Namespace:
    return command._options(["--workers", "1", *arguments])


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Trainings that are planted, not done; the folders whose head was measured on the second set."""
    folders: list[str] = []

    def run(job: Job) -> None:
        assert job.measure == "stdlib"
        counts = planted([LENGTHS.get(job.name, 1.45) + 0.01 * job.seed] * 100)
        write_json(Path(job.directory) / RESULT, a_result(job, counts))

    def load(folder: Path) -> Any:
        folders.append(folder.parent.name.partition("-")[0])
        return SimpleNamespace(eval=lambda: folders[-1])

    def count(head: str, store: Any, name: str, k: int) -> Tensor:
        assert name == "humaneval"
        return planted([SECOND[head]] * 64)

    def planted_work(jobs: Any, workers: int, console: Console) -> list[dict[str, Any]]:
        return work(jobs, workers, console, cast(Callable[[Job], None], run))

    monkeypatch.setattr(command, "work", planted_work)
    monkeypatch.setattr(command, "load_head", load)
    monkeypatch.setattr(command, "counts_by_prompt", count)
    return folders


def test_the_second_set_is_opened_once_for_base_and_combination_and_chooses_nothing(
    bench: Bench, opened: list[str]
) -> None:
    command._ablate(bench, options(), QUIET)
    assert sorted(opened) == ["base", "base", "combination", "combination"]
    written = read_json(bench.output / "ablation.json")
    assert written["combination"] == ["head.layers=2"]
    (base, combination) = written["tables"]["humaneval"]
    assert combination["gain"] == pytest.approx(-0.1) and base["gain"] == 0
    assert {row["variant"] for row in written["tables"]["stdlib"]} >= {"base", "layers=2", "loss=ce"}
    command._ablate(bench, options(), QUIET)
    assert len(opened) == 4


def test_a_part_of_the_groups_leaves_the_second_set_closed(bench: Bench, opened: list[str]) -> None:
    command._ablate(bench, options("--only", "layers,k"), QUIET)
    assert not opened
    command._ablate(bench, options("--only", "layers,k", "--final"), QUIET)
    assert len(opened) == 4


def test_a_plan_trains_nothing(bench: Bench, opened: list[str]) -> None:
    console = Console(width=300)
    with console.capture() as captured:
        command._ablate(bench, options("--plan"), console)
    assert "42 trainings of 120 CPU-seconds, 0 of them there" in captured.get()
    assert not bench.output.exists()


def test_the_docs_name_command_and_commit_between_their_marks(
    bench: Bench, opened: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = tmp_path / "ablation.md"
    page.write_text(f"# Before\n\n{report.BEGIN}\nold\n{report.END}\n\nAfter.\n")
    monkeypatch.setattr(command, "DOCS", page)
    monkeypatch.setattr(report, "commit", lambda: "abc123")
    command._ablate(bench, options("--only", "layers", "--write-docs"), QUIET)
    text = page.read_text()
    assert text.startswith("# Before\n") and text.endswith("\n\nAfter.\n") and "old" not in text
    assert "`python -m scripts.ablate --workers 1 --only layers --write-docs` at commit abc123" in text
    assert "| layers | layers=2 | 7/7 | 1.605 | 1.605 to 1.605 | +0.100 | +0.100 to +0.100 |" in text
    assert read_json(page.with_suffix(".json"))["combination"] == ["head.layers=2"]
    page.write_text("no marks\n")
    with pytest.raises(PeagleError, match="expected the lines"):
        report.put_between(page, "text")


def test_the_page_of_the_docs_has_its_marks() -> None:
    text = (Path(__file__).parents[1] / command.DOCS).read_text()
    assert text.count(report.BEGIN) == text.count(report.END) == 1
