"""When a stage is skipped, resumed, or started anew; and what is kept of the old."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from peagle_train.errors import CorruptError, PeagleError, StaleError
from peagle_train.files import fingerprint, read_json
from peagle_train.recipe import Recipe, load_recipe
from peagle_train.run import FOLDERS, Run
from peagle_train.stages import StageResult, begin, finished, make_room, read_record, require, seal
from tests.recipe.test_load import GOOD

PARTS = {
    "stage": "prepare",
    "format": "1",
    "target": "abcd",
    "data": {"train": {"count": 320}},
    "betas": (1, 2),
}


@pytest.fixture
def console() -> Console:
    return Console(record=True, width=300)


def other(**changes: Any) -> dict[str, Any]:
    return PARTS | changes


def test_nothing_there_is_work_to_do(tmp_path: Path, console: Console) -> None:
    assert finished(tmp_path / "answers", PARTS, console) is None
    (tmp_path / "answers").mkdir()
    assert finished(tmp_path / "answers", PARTS, console) is None
    assert console.export_text() == ""


def test_finished_work_is_skipped_with_its_seconds(tmp_path: Path, console: Console) -> None:
    folder = tmp_path / "answers"
    assert begin(folder, PARTS, console) is False
    result = seal(folder, PARTS, 12.5, "answered 320 prompts", "peagle extract x")
    assert result == StageResult("prepare", 12.5, False, "answered 320 prompts", "peagle extract x")
    (folder / "rows").write_text("x")

    again = finished(folder, dict(reversed(PARTS.items())), console)
    assert again is not None
    assert (again.name, again.seconds, again.skipped) == ("prepare", 12.5, True)
    assert fingerprint(PARTS)[:8] in again.message
    assert (folder / "rows").exists()


def test_the_record_says_what_the_folder_was_made_from(tmp_path: Path, console: Console) -> None:
    begin(tmp_path, PARTS, console)
    assert read_json(tmp_path / "stage.json")["finished"] is None
    seal(tmp_path, PARTS, 1.0)
    record = read_json(tmp_path / "stage.json")
    assert record["stage"] == "prepare"
    assert record["fingerprint"] == fingerprint(PARTS)
    assert record["parts"]["data"] == {"train": {"count": 320}}
    assert record["seconds"] == 1.0
    assert record["finished"].startswith("20")
    assert {"python", "torch", "transformers", "peagle-train"} <= set(record["versions"])


def test_unfinished_work_of_the_same_inputs_resumes(tmp_path: Path, console: Console) -> None:
    folder = tmp_path / "answers"
    begin(folder, PARTS, console)
    (folder / "batch-0").write_text("x")
    assert finished(folder, PARTS, console) is None
    assert begin(folder, PARTS, console) is True
    assert (folder / "batch-0").exists()
    assert console.export_text() == ""
    seal(folder, PARTS, 1.0)
    record = read_record(folder)
    assert record is not None
    assert record.attempts == 2


@pytest.mark.parametrize("sealed", [True, False])
def test_other_inputs_set_the_folder_aside_and_name_the_keys(
    tmp_path: Path, console: Console, sealed: bool
) -> None:
    folder = tmp_path / "answers"
    begin(folder, PARTS, console)
    (folder / "rows").write_text("precious")
    if sealed:
        seal(folder, PARTS, 1.0)
    changed = other(data={"train": {"count": 64}, "workers": 2}, target="ef01")
    del changed["format"]
    assert finished(folder, changed, console) is None
    assert (folder / "rows").exists()  # until the new inputs are known to be sound
    begin(folder, changed, console)
    assert not (folder / "rows").exists()
    aside = tmp_path / f"answers.old-{fingerprint(PARTS)[:8]}"
    assert (aside / "rows").read_text() == "precious"
    said = console.export_text()
    for part in (
        'format: "1", now none',
        'target: "abcd", now "ef01"',
        "data.train.count: 320, now 64",
        "data.workers: none, now 2",
        f"kept as {aside.name}",
    ):
        assert part in said
    assert "betas" not in said  # a tuple equals the list it became in the file


def test_begin_alone_never_mixes_inputs(tmp_path: Path, console: Console) -> None:
    folder = tmp_path / "answers"
    begin(folder, PARTS, console)
    (folder / "batch-0").write_text("x")
    assert begin(folder, other(target="ef01"), console) is False
    assert not (folder / "batch-0").exists()
    assert (tmp_path / f"answers.old-{fingerprint(PARTS)[:8]}" / "batch-0").exists()


def test_folders_set_aside_never_replace_each_other(tmp_path: Path, console: Console) -> None:
    folder = tmp_path / "answers"
    for number in range(3):
        begin(folder, PARTS, console)
        (folder / "number").write_text(str(number))
        make_room(folder, other(target="ef01"), console)
    label = fingerprint(PARTS)[:8]
    kept = [tmp_path / f"answers.old-{label}{suffix}" for suffix in ("", "-2", "-3")]
    assert [(aside / "number").read_text() for aside in kept] == ["0", "1", "2"]


def test_a_folder_set_aside_is_taken_back_when_its_inputs_return(tmp_path: Path, console: Console) -> None:
    folder, changed = tmp_path / "answers", other(target="ef01")
    for parts, text in ((PARTS, "first"), (changed, "second")):
        begin(folder, parts, console)
        (folder / "rows").write_text(text)
        seal(folder, parts, 1.0)
    found = finished(folder, PARTS, console)
    assert found is not None and found.skipped
    assert (folder / "rows").read_text() == "first"
    assert "was made from these inputs and is taken back" in console.export_text(clear=False)
    assert finished(folder, changed, console) is not None
    assert (folder / "rows").read_text() == "second"
    # What is not whole, or was never finished, is not taken back.
    aside = tmp_path / f"answers.old-{fingerprint(PARTS)[:8]}"
    (aside / "rows").unlink()
    assert finished(folder, PARTS, console) is None
    assert (folder / "rows").read_text() == "second"


def test_a_folder_of_unknown_origin_is_set_aside(tmp_path: Path, console: Console) -> None:
    folder = tmp_path / "answers"
    folder.mkdir()
    (folder / "rows").write_text("whose?")
    assert begin(folder, PARTS, console) is False
    assert (tmp_path / "answers.old-unknown" / "rows").exists()
    assert "holds no stage.json" in console.export_text()


@pytest.mark.parametrize("content", ["{", "[]", '{"stage": "prepare"}'])
def test_an_unreadable_record_is_not_guessed_at(tmp_path: Path, console: Console, content: str) -> None:
    (tmp_path / "stage.json").write_text(content)
    with pytest.raises(CorruptError, match=r"stage\.json: found no readable record"):
        finished(tmp_path, PARTS, console)


def test_finished_work_cannot_be_begun_again(tmp_path: Path, console: Console) -> None:
    seal(tmp_path, PARTS, 1.0)
    with pytest.raises(ValueError, match="is finished"):
        begin(tmp_path, PARTS, console)


def test_work_cannot_be_sealed_under_other_inputs(tmp_path: Path, console: Console) -> None:
    begin(tmp_path, PARTS, console)
    with pytest.raises(StaleError, match=r'target: "abcd", now "ef01"'):
        seal(tmp_path, other(target="ef01"), 1.0)


class TestRequire:
    """A stage reads an earlier one only if that one is finished and of this recipe."""

    def run(self, tmp_path: Path, *overrides: str) -> Run:
        path = tmp_path / "tiny.yaml"
        path.write_text(GOOD)
        recipe: Recipe = load_recipe(path, [f"output={tmp_path}", *overrides])
        return Run(recipe, str(path), overrides, ("peagle",), cast(Any, SimpleNamespace()))

    def prepared(self, run: Run, **more: Any) -> dict[str, Any]:
        data = run.recipe.data.model_dump(mode="json", exclude={"workers"})
        parts = {"stage": "prepare", "data": data, "target": "abcd", **more}
        begin(run.answers_dir, parts)
        seal(run.answers_dir, parts, 1.0)
        return parts

    def extracted(self, run: Run, prepare: str) -> dict[str, Any]:
        parts = {
            "stage": "extract",
            "prepare": prepare,
            "head.aux_layers": run.recipe.head.aux_layers,
            "states": {"dtype": run.recipe.states.dtype},
        }
        begin(run.states_dir, parts)
        seal(run.states_dir, parts, 1.0)
        return parts

    def test_finished_and_fitting(self, tmp_path: Path) -> None:
        run = self.run(tmp_path)
        parts = self.prepared(run)
        assert require(run, "prepare") == fingerprint(parts)
        assert require(run, "prepare") == require(
            self.run(tmp_path, "data.workers=2", "train.steps=5"), "prepare"
        )

    def test_not_run_or_not_finished(self, tmp_path: Path) -> None:
        run = self.run(tmp_path)
        with pytest.raises(
            PeagleError, match=r"prepare has not run; run `peagle prepare .*tiny\.yaml` first"
        ):
            require(run, "prepare")
        begin(run.answers_dir, PARTS)
        with pytest.raises(PeagleError, match="prepare has not finished"):
            require(run, "prepare")

    @pytest.mark.parametrize(
        ("override", "named"),
        [
            ("data.max_new_tokens=8", r"data\.max_new_tokens: 64 there, 8 in the recipe"),
            ("data.train.count=8", r"data\.train\.count: null there, 8 in the recipe"),
            (
                "data.heldout.more={source: a.jsonl}",
                r"data\.heldout\.more: null there, \{.*a\.jsonl.* in the recipe",
            ),
            (
                "data.heldout={other: {source: a.jsonl}}",
                r"data\.heldout\.stdlib: \{.*there, null in the recipe",
            ),
        ],
    )
    def test_a_changed_recipe_is_named(self, tmp_path: Path, override: str, named: str) -> None:
        self.prepared(self.run(tmp_path))
        with pytest.raises(StaleError, match=named):
            require(self.run(tmp_path, override), "prepare")

    @pytest.mark.parametrize(
        ("override", "named"),
        [
            ("head.aux_layers=[1]", r"head\.aux_layers: \[1, 2\] there, \[1\] in the recipe"),
            ("states.dtype=float32", r'states\.dtype: "bfloat16" there, "float32" in the recipe'),
        ],
    )
    def test_flat_and_nested_keys_are_both_known(self, tmp_path: Path, override: str, named: str) -> None:
        run = self.run(tmp_path)
        self.extracted(run, fingerprint(self.prepared(run)))
        with pytest.raises(StaleError, match=named):
            require(self.run(tmp_path, override), "extract")

    def test_an_earlier_stage_that_was_made_anew_is_named(self, tmp_path: Path) -> None:
        run = self.run(tmp_path)
        self.extracted(run, fingerprint(self.prepared(run)))
        require(run, "extract")
        self.prepared(run, template="new")
        with pytest.raises(
            StaleError, match=r"prepare: [0-9a-f]{8} there, [0-9a-f]{8} now.*run `peagle extract"
        ):
            require(run, "extract")

    def test_a_change_further_up_is_named_at_its_cause(self, tmp_path: Path) -> None:
        run = self.run(tmp_path)
        self.extracted(run, fingerprint(self.prepared(run)))
        with pytest.raises(StaleError, match=r"answers: .*data\.max_new_tokens.*run `peagle prepare"):
            require(self.run(tmp_path, "data.max_new_tokens=8"), "extract")

    def test_states_may_come_without_their_answers(self, tmp_path: Path) -> None:
        run = self.run(tmp_path)
        parts = self.extracted(run, "0123456789abcdef")
        assert not run.answers_dir.exists()
        assert require(run, "extract") == fingerprint(parts)


def test_every_stage_has_a_folder_of_its_own() -> None:
    assert len(set(FOLDERS.values())) == len(FOLDERS) == 5
