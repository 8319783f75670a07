"""The whole road on a tiny target: from prompts to a measured head, twice, killed, changed and launched."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from peagle_train import Run, run_all
from peagle_train.errors import PeagleError, RecipeError
from peagle_train.export.checks import check_head
from peagle_train.export.layout import export_head
from peagle_train.head.io import load_head
from peagle_train.pipeline import evaluate_other, run_stage
from peagle_train.store import StateStore
from tests.data_prep.inline import InlineJobs
from tests.tiny_run import tiny_recipe


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recipe of seconds: 8 questions of the user's own to train on, 4 to choose by, 4 to report on."""
    folder = tmp_path_factory.mktemp("road")
    return tiny_recipe(
        folder,
        "twin",
        heldout=4,
        train={"positions": 5, "batch_tokens": 128, "validate_every": 6, "checkpoint_every": 6},
        export={"dtype": "float32"},
        evaluate={"k": 4, "loop_prompts": 3},
    )


@pytest.fixture(scope="module")
def done(recipe: Path) -> dict:
    """The summary of a first, whole run."""
    with Run.open(recipe) as run:
        return run_all(run, Console(quiet=True))


def test_the_summary_says_what_users_and_machines_need(done: dict, recipe: Path) -> None:
    figures = done["sets"]["sums"]
    assert figures["prompts"] == 4 and figures["num_drafts"] > 0
    assert figures["acceptance_length"] == pytest.approx(
        1 + figures["num_accepted"] / figures["num_drafts"], abs=1e-4
    )
    assert len(figures["per_position"]) == 4
    assert figures["loop"]["lossless"] is True and figures["loop"]["prompts"] == 3
    assert set(done["stages"]) == {"prepare", "extract", "train", "export", "evaluate"}
    assert (done["seed"], done["steps"]) == (0, 12)
    assert done["versions"]["torch"]
    run = recipe.parent / "runs" / "twin"
    assert json.loads((run / "summary.json").read_text()) == done
    assert (run / "recipe.resolved.yaml").is_file() and (run / "run.json").is_file()
    check_head(run / "head", None)


def test_a_second_run_does_nothing_again(done: dict, recipe: Path) -> None:
    with Run.open(recipe) as run:
        again = run_all(run, Console(quiet=True))
    assert all(stage["skipped"] for stage in again["stages"].values())
    assert again["sets"] == done["sets"] and again["weights_sha256"] == done["weights_sha256"]


def test_the_same_seed_gives_the_same_head_from_scratch(
    done: dict, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("data_prep.prepare.run_jobs", InlineJobs())
    with Run.open(recipe, ["name=again"]) as run:
        again = run_all(run, Console(quiet=True))
    assert again["weights_sha256"] == done["weights_sha256"]
    assert again["sets"] == done["sets"]


def test_the_eagle3_baseline_on_the_states_of_another_run(done: dict, recipe: Path) -> None:
    """The two methods on the same states, as recipes/README.md tells it: links to the other run's folders."""
    runs = recipe.parent / "runs"
    (runs / "baseline").mkdir()
    for folder in ("answers", "states"):
        (runs / "baseline" / folder).symlink_to(Path("..") / "twin" / folder)
    kept = {file: file.stat().st_mtime_ns for file in (runs / "twin").rglob("*") if file.is_file()}
    with Run.open(recipe, ["name=baseline", "method=eagle3", "head.mask_token=", "train.cod.rate=1"]) as run:
        summary = run_all(run, Console(quiet=True))
    assert kept == {file: file.stat().st_mtime_ns for file in kept}
    skipped = {name for name, stage in summary["stages"].items() if stage["skipped"]}
    assert skipped == {"prepare", "extract"}
    assert check_head(runs / "baseline" / "head", None).config.method == "eagle3"
    assert '"parallel_drafting": false' in summary["serve"]
    figures = summary["sets"]["sums"]
    assert figures["loop"]["lossless"] is True and figures["loop"]["prompts"] == 3
    with (
        Run.open(recipe, ["name=baseline", "data.max_new_tokens=10"]) as run,
        pytest.raises(PeagleError, match=r"data\.max_new_tokens: 20 there, 10"),
    ):
        run_stage(run, "extract", Console(quiet=True))
    assert kept == {file: file.stat().st_mtime_ns for file in kept}


def test_a_baseline_is_prepared_without_a_mask_token(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Up to the answering itself, which knows nothing of heads."""

    class Rendered(Exception):
        pass

    def stop(*_: object) -> None:
        raise Rendered

    monkeypatch.setattr("data_prep.prepare.even_batches", stop)
    with (
        Run.open(recipe, ["name=alone", "method=eagle3", "head.mask_token="]) as run,
        pytest.raises(Rendered),
    ):
        run_stage(run, "prepare", Console(quiet=True))


@pytest.mark.slow
def test_states_made_by_a_second_pass_give_the_same_head_length(done: dict, recipe: Path) -> None:
    with Run.open(recipe, ["name=second", "states.keep_while_answering=false"]) as run:
        again = run_all(run, Console(quiet=True))
    assert not again["stages"]["extract"]["skipped"]
    ours, theirs = again["sets"]["sums"], done["sets"]["sums"]
    assert ours["num_drafts"] == pytest.approx(theirs["num_drafts"], abs=3)


def test_a_changed_recipe_trains_anew_and_keeps_the_old(done: dict, recipe: Path) -> None:
    shutil.copytree(recipe.parent / "runs" / "twin", recipe.parent / "runs" / "changed")
    with Run.open(recipe, ["name=changed", "train.learning_rate=5e-4"]) as run:
        again = run_all(run, Console(quiet=True))
        skipped = {name: stage["skipped"] for name, stage in again["stages"].items()}
        assert skipped["prepare"] and skipped["extract"] and not skipped["train"] and not skipped["export"]
        assert again["weights_sha256"] != done["weights_sha256"]
        assert list(run.directory.glob("training.old-*")) and list(run.directory.glob("head.old-*"))


def test_trackers_change_neither_the_head_nor_what_is_finished(done: dict, recipe: Path) -> None:
    track = ["track.log_with=[tensorboard]", "track.offline=true"]
    with Run.open(recipe, track) as run:
        again = run_all(run, Console(quiet=True))
        assert all(stage["skipped"] for stage in again["stages"].values())
        assert not (run.training_dir / "tracking").exists()

    runs = recipe.parent / "runs"
    for stage in ("answers", "states"):
        shutil.copytree(runs / "twin" / stage, runs / "tracked" / stage)
    with Run.open(recipe, ["name=tracked", *track]) as run:
        again = run_all(run, Console(quiet=True))
        assert not again["stages"]["train"]["skipped"]
        assert again["weights_sha256"] == done["weights_sha256"]
        (events,) = (run.training_dir / "tracking" / "peagle").iterdir()
        events.write_bytes(events.read_bytes() + b"later")  # a tracker's own program went on
        again = run_all(run, Console(quiet=True))
        assert all(stage["skipped"] for stage in again["stages"].values())


def test_an_absent_tracker_is_told_before_answers_are_paid_for(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("peagle_train.training.tracking.get_available_trackers", list)
    with (
        Run.open(recipe, ["name=absent", "track.log_with=[mlflow]"]) as run,
        pytest.raises(PeagleError, match=r"track\.log_with: not installed here: mlflow; run `pip install"),
    ):
        run_all(run, Console(quiet=True))
    assert not (recipe.parent / "runs" / "absent" / "answers").exists()


def test_stages_out_of_order_name_the_one_to_run(recipe: Path) -> None:
    with Run.open(recipe, ["name=empty"]) as run:
        for stage in ("extract", "train", "export", "evaluate"):
            with pytest.raises(PeagleError, match=r"has not run; run `peagle"):
                run_stage(run, stage, Console(quiet=True))


@pytest.mark.processes
@pytest.mark.parametrize("processes", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_the_training_stage_under_a_launcher(done: dict, recipe: Path, processes: int) -> None:
    """One process trains the same head as `peagle train`; two share each step's rows."""
    name = f"launched{processes}"
    runs = recipe.parent / "runs"
    (runs / name).mkdir()
    for stage in ("answers", "states"):
        shutil.copytree(runs / "twin" / stage, runs / name / stage)
    launch = (
        ["-m", "accelerate.commands.launch", "--cpu", "--num_processes", "1", "--num_machines", "1"]
        if processes == 1
        else ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(processes)]
    )
    done_by = subprocess.run(
        [
            sys.executable,
            *launch,
            "-m",
            "peagle_train.training",
            str(recipe),
            f"name={name}",
            f"train.accumulate={2 // processes}",
        ],
        env={**os.environ, "ACCELERATE_USE_CPU": "true", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done_by.returncode == 0, done_by.stderr[-3000:]

    def losses(run: str) -> list[float]:
        lines = (runs / run / "training" / "log.jsonl").read_text().splitlines()
        return [record["loss"] for record in map(json.loads, lines) if "loss" in record]

    assert losses(name) == pytest.approx(losses("twin"), rel=1e-4)


def copy_of(recipe: Path, name: str) -> Path:
    """A finished run under another name, to be damaged."""
    runs = recipe.parent / "runs"
    shutil.copytree(runs / "twin", runs / name)
    return runs / name


@pytest.mark.parametrize(
    "stage,lost",
    [
        ("train", "training/best/head.safetensors"),
        ("export", "head/model.safetensors"),
        ("evaluate", "evaluation/results.json"),
    ],
)
def test_a_finished_stage_that_lost_a_file_is_made_anew(
    done: dict, recipe: Path, stage: str, lost: str
) -> None:
    folder = copy_of(recipe, f"lost-{stage}")
    (folder / lost).unlink()
    with Run.open(recipe, [f"name=lost-{stage}"]) as run:
        again = run_all(run, Console(quiet=True))
    assert not again["stages"][stage]["skipped"]
    assert again["weights_sha256"] == done["weights_sha256"] and again["sets"] == done["sets"]
    assert list(folder.glob("*.old-*-damaged"))


def test_a_lost_file_further_up_is_named_with_the_command(done: dict, recipe: Path) -> None:
    folder = copy_of(recipe, "lost-head")
    (folder / "head" / "model.safetensors").unlink()
    with (
        Run.open(recipe, ["name=lost-head"]) as run,
        pytest.raises(PeagleError, match=r"model\.safetensors: missing .*run `peagle export"),
    ):
        run_stage(run, "evaluate", Console(quiet=True))


def test_training_refuses_states_that_were_damaged(done: dict, recipe: Path) -> None:
    folder = copy_of(recipe, "bent")
    trained = StateStore(folder / "states").info("train")
    for name in {info.shard for info in trained}:
        shard = folder / "states" / name
        content = bytearray(shard.read_bytes())
        content[-len(content) // 2 :: 256] = bytes(len(content[-len(content) // 2 :: 256]))
        shard.write_bytes(bytes(content))
    with (
        Run.open(recipe, ["name=bent", "train.steps=9"]) as run,
        pytest.raises(
            PeagleError,
            match=r"row \d+ \(train .*differ from their checksum; run `peagle extract RECIPE --repair`",
        ),
    ):
        run_stage(run, "train", Console(quiet=True))


@pytest.mark.parametrize("token", ["What", "<|im_end|>", "hello world", 9999])
def test_a_bad_mask_token_costs_seconds_not_the_answers(recipe: Path, token: str | int) -> None:
    with (
        Run.open(recipe, ["name=masked"]) as run,
        pytest.raises(PeagleError, match=r"mask_token"),
    ):
        bad = run.recipe.model_copy(update={"head": run.recipe.head.model_copy(update={"mask_token": token})})
        run_stage(replace(run, recipe=bad), "prepare", Console(quiet=True))
    assert not (recipe.parent / "runs" / "masked" / "answers").exists()


def test_any_head_is_measured_and_the_runs_own_results_stay(done: dict, recipe: Path) -> None:
    folder = copy_of(recipe, "measured")
    own = (folder / "evaluation" / "results.json").read_bytes()
    other = recipe.parent / "other"
    shutil.copytree(folder / "head", other)
    console = Console(file=io.StringIO(), width=200)
    with Run.open(recipe, ["name=measured"]) as run:
        first = evaluate_other(run, other, console)
        again = evaluate_other(run, other, console)
    assert not first.skipped and again.skipped
    (results,) = folder.glob("evaluation-other-*/results.json")
    # It is the same head, so it has the same figures, though they were measured anew.
    assert json.loads(results.read_text()) == json.loads(own)
    assert (folder / "evaluation" / "results.json").read_bytes() == own
    printed = console.file.getvalue()
    assert printed.count("Acceptance on held-out prompts, K = 4") == 2
    assert f"{done['sets']['sums']['acceptance_length']:.2f}" in printed


def test_a_head_that_reads_other_layers_is_refused_with_the_way_out(done: dict, recipe: Path) -> None:
    folder, other = copy_of(recipe, "layered"), recipe.parent / "layered"
    with Run.open(recipe, ["name=layered"]) as run:
        head = load_head(folder / "training" / "best")
        head.config = replace(head.config, aux_layers=(0, 2, 4))
        export_head(head, other, target=run.facts, dtype="float32")
        with pytest.raises(
            PeagleError, match=r"reads the layers \[0,2,4\]; expected \[1, 2, 3\].*aux_layers"
        ):
            evaluate_other(run, other, Console(quiet=True))
        (other / "export.json").unlink()
        config = json.loads((other / "config.json").read_text())
        del config["num_aux_hidden_states"]
        (other / "config.json").write_text(json.dumps(config))
        with pytest.raises(PeagleError, match=r"bring it in first: peagle import .* --target"):
            evaluate_other(run, other, Console(quiet=True))
    assert not list(folder.glob("evaluation-*"))


def test_training_goes_on_from_the_runs_own_head(done: dict, recipe: Path) -> None:
    folder = copy_of(recipe, "warm")
    given = ["name=warm", f"head.start_from={recipe.parent / 'runs' / 'twin' / 'head'}", "train.steps=6"]
    with Run.open(recipe, given) as run:
        result = run_stage(run, "train", Console(quiet=True))
        assert not result.skipped
        assert run_stage(run, "train", Console(quiet=True)).skipped
    start = json.loads((folder / "training" / "log.jsonl").read_text().splitlines()[0])
    best = json.loads((recipe.parent / "runs" / "twin" / "training" / "best" / "score.json").read_text())
    assert (start["step"], start["validation"]) == (0, best["validation"])
    with pytest.raises(RecipeError, match=r"head.layers: found 2; expected 1 as in .*write head.layers=1"):
        Run.open(recipe, [*given, "head.layers=2"])
