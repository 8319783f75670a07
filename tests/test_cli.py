"""The command line: what it teaches, what it runs, what it says when something is wrong.

The verbs run here with small stages in place of the real ones; records, skipping, locking and the
summary are the real thing.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from peagle_train import pipeline
from peagle_train.cli import app
from peagle_train.errors import PeagleError
from peagle_train.files import read_json, write_json
from peagle_train.pipeline import Stage
from peagle_train.run import Run
from peagle_train.stages import StageResult, begin, finished, require, seal
from tests.test_run import CONFIG, recipe_file  # noqa: F401  (a fixture)

VERBS = ["prepare", "extract", "train", "export", "evaluate", "run", "plan", "init", "doctor", "twin"]
VERBS += ["push", "import", "check", "sources", "recipe"]
LOOP = {"lossless": True, "near_ties": 1, "prompts": 4, "tokens": 90}
MEASURED = {
    "acceptance_length": 1.75,
    "per_position": [0.5, 0.25, 0.0, 0.0, 0.0],
    "num_drafts": 400,
    "num_accepted": 300,
    "prompts": 100,
    "tokens": 700,
}
worked: list[str] = []


def _small_stage(run: Run, console: Console, name: str, seconds: float, parts: dict[str, Any]) -> StageResult:
    folder = run.stage_dir(name)
    parts = {"stage": name, **parts}
    done = finished(folder, parts, console)
    if done is not None:
        return done
    begin(folder, parts, console)
    worked.append(name)
    if name == "train" and run.recipe.seed == 13:
        raise KeyboardInterrupt
    if name == "export":
        (folder / "model.safetensors").write_bytes(b"weights")
    if name == "evaluate":
        none = {"prompts": 0, "lossless": True}
        sets = {
            "stdlib": {"offline": MEASURED, "loop": MEASURED | LOOP},
            "dry": {"offline": MEASURED, "loop": none},
        }
        write_json(folder / "results.json", {"sets": sets})
    return seal(folder, parts, seconds, f"wrote {folder}")


def prepare(run: Run, console: Console) -> StageResult:
    data = run.recipe.data.model_dump(mode="json", exclude={"workers"})
    return _small_stage(run, console, "prepare", 1.0, {"data": data})


def extract(run: Run, console: Console) -> StageResult:
    return _small_stage(run, console, "extract", 2.0, {"prepare": require(run, "prepare")})


def train(run: Run, console: Console, *, anew: bool = False, open_states: Any = None) -> StageResult:
    parts = {"extract": require(run, "extract"), "train.steps": run.recipe.train.steps}
    return _small_stage(run, console, "train", 3.0, parts)


def export(run: Run, console: Console) -> StageResult:
    parts = {"train": require(run, "train"), "export.format": run.recipe.export.format}
    return _small_stage(run, console, "export", 4.0, parts)


def evaluate(run: Run, console: Console, *, open_states: Any = None) -> StageResult:
    parts = {"export": require(run, "export"), "evaluate.k": run.recipe.evaluate.k}
    return _small_stage(run, console, "evaluate", 5.0, parts)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch, recipe_file: Path) -> Iterator[Path]:  # noqa: F811
    worked.clear()
    stages = tuple(Stage(s.name, f"{__name__}:{s.name}", s.needs) for s in pipeline.STAGES)
    monkeypatch.setattr(pipeline, "STAGES", stages)
    monkeypatch.setattr(
        pipeline, "_serve_command", lambda run, console: f"vllm serve T --with {run.head_dir}"
    )
    monkeypatch.setenv("COLUMNS", "200")
    yield recipe_file


def peagle(*arguments: str, code: int = 0) -> tuple[str, str]:
    """Runs the command; returns what it printed and what it complained about."""
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code == code, result.output
    return result.stdout, result.stderr


@pytest.mark.parametrize("verb", VERBS)
def test_the_help_of_every_verb_teaches(verb: str) -> None:
    said, _ = peagle(verb, "--help")
    for part in ("Reads:", "Writes:", "Example:", f"peagle {verb}", "Then:"):
        assert part in said


def test_the_help_shows_the_verbs_in_the_order_of_the_work() -> None:
    said, _ = peagle("--help")
    listed = said[said.index("Commands:") :]
    assert sorted(VERBS, key=lambda verb: listed.index(f"\n  {verb} ")) == VERBS


def test_help_is_instant_and_nothing_heavy_is_imported() -> None:
    code = (
        "import sys, peagle_train, peagle_train.cli; "
        "from peagle_train import Run, run_all, run_stage, load_recipe; "
        "print([name for name in ('torch', 'transformers', 'numpy', 'accelerate') if name in sys.modules])"
    )
    before = os.times()
    assert subprocess.check_output([sys.executable, "-c", code], text=True) == "[]\n"
    subprocess.run([sys.executable, "-c", "from peagle_train.cli import main; main()", "--help"], check=True)
    after = os.times()
    spent = after.children_user + after.children_system - before.children_user - before.children_system
    assert spent < 3.0  # CPU seconds for both; each is about 0.4 on an idle machine


def test_version_names_everything_that_matters() -> None:
    said, _ = peagle("--version")
    assert "peagle-train 0.1.0" in said
    assert "\ntorch 2." in said


def test_run_ends_with_table_head_and_serving_command(small: Path) -> None:
    said, _ = peagle("run", "tiny.yaml")
    assert worked == ["prepare", "extract", "train", "export", "evaluate"]
    for part in (
        "[3/5] train",
        "1.75",
        "0.50 0.25 0.00 0.00 0.00",
        "stdlib: 4 prompts through the speculative loop, output equal to greedy decoding, 1 near ties",
        "dry: no prompt went through the speculative loop",
        "15.0",
        "Head:  runs/tiny/head",
        "vllm serve T --with runs/tiny/head",
        "runs/tiny/summary.json",
        "Next: peagle push runs/tiny/head s3://BUCKET/PREFIX",
    ):
        assert part in said, part


def test_the_summary_is_complete(small: Path) -> None:
    peagle("run", "tiny.yaml", "seed=5")
    summary = read_json(Path("runs/tiny/summary.json"))
    assert summary["sets"]["stdlib"] == {**MEASURED, "loop": MEASURED | LOOP}
    assert summary["sets"]["dry"]["loop"] is None
    assert summary["stages"]["train"] == {"seconds": 3.0, "skipped": False}
    assert (summary["seconds"], summary["seed"], summary["steps"], summary["k"]) == (15.0, 5, 20, 5)
    assert (summary["head"], summary["target"]) == ("runs/tiny/head", "./target")
    assert len(summary["weights_sha256"]) == 64
    assert summary["versions"]["torch"]


def test_a_second_run_skips_everything_and_keeps_the_seconds(small: Path) -> None:
    peagle("run", "tiny.yaml")
    worked.clear()
    said, _ = peagle("run", "tiny.yaml")
    assert worked == []
    assert said.count("skipped, runs/tiny/") == 5
    stages = read_json(Path("runs/tiny/summary.json"))["stages"]
    assert stages["extract"] == {"seconds": 2.0, "skipped": True}


def test_a_changed_key_redoes_what_depends_on_it_and_nothing_else(small: Path) -> None:
    peagle("run", "tiny.yaml")
    worked.clear()
    said, _ = peagle("run", "tiny.yaml", "train.steps=30")
    assert worked == ["train", "export", "evaluate"]
    assert "train.steps: 20, now 30" in said
    assert len(list(Path("runs/tiny").glob("training.old-*"))) == 1
    assert len(list(Path("runs/tiny").glob("answers.old-*"))) == 0


def test_stages_one_by_one_name_the_next_command(small: Path) -> None:
    said, _ = peagle("prepare", "tiny.yaml", "train.steps=9")
    assert "Next: peagle extract tiny.yaml train.steps=9" in said
    peagle("extract", "tiny.yaml")
    peagle("train", "tiny.yaml")
    peagle("export", "tiny.yaml")
    said, _ = peagle("evaluate", "tiny.yaml", "push.to=hf://me/head")
    assert "Next: peagle push runs/tiny/head hf://me/head" in said
    stages = read_json(Path("runs/tiny/summary.json"))["stages"]
    assert [stage["skipped"] for stage in stages.values()] == [True, True, True, True, False]


def test_a_stage_without_its_input_names_the_command_that_makes_it(small: Path) -> None:
    _, complaint = peagle("train", "tiny.yaml", "train.steps=9", code=1)
    assert complaint == (
        "peagle: runs/tiny/states: extract has not run; run `peagle extract tiny.yaml train.steps=9` first, "
        "or `peagle run tiny.yaml train.steps=9` for all\n"
    )


def test_a_stage_does_not_read_what_another_recipe_made(small: Path) -> None:
    peagle("prepare", "tiny.yaml")
    _, complaint = peagle("extract", "tiny.yaml", "data.max_new_tokens=8", code=1)
    assert "data.max_new_tokens: 64 there, 8 in the recipe" in complaint
    assert "Traceback" not in complaint


def test_stopped_work_resumes_with_the_same_command(small: Path) -> None:
    _, complaint = peagle("run", "tiny.yaml", "seed=13", code=130)
    assert "the same command goes on" in complaint
    record = read_json(Path("runs/tiny/training/stage.json"))
    assert record["finished"] is None
    worked.clear()
    peagle("run", "tiny.yaml")
    assert worked == ["train", "export", "evaluate"]
    assert not list(Path("runs/tiny").glob("training.old-*"))


def test_export_format_is_an_override(small: Path) -> None:
    for verb in ("prepare", "extract", "train"):
        peagle(verb, "tiny.yaml")
    said, _ = peagle("export", "tiny.yaml", "--format", "speculators")
    assert "Next: peagle evaluate tiny.yaml export.format=speculators" in said
    assert read_json(Path("runs/tiny/head/stage.json"))["parts"]["export.format"] == "speculators"
    _, complaint = peagle("export", "tiny.yaml", "--format", "speculator", code=2)
    assert "export.format: found the text 'speculator'" in complaint
    assert "did you mean speculators?" in complaint


def test_prepare_shows_rows_when_asked(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = []
    real = pipeline.resolve

    def resolve(dotted: str) -> Any:
        if dotted == "data_prep.show:show":
            return lambda run, count, console: shown.append((run.answers_dir, count))
        return real(dotted)

    monkeypatch.setattr(pipeline, "resolve", resolve)
    peagle("prepare", "tiny.yaml")
    peagle("prepare", "tiny.yaml", "--show", "3")
    assert shown == [(Path("runs/tiny/answers"), 3)]


def test_a_faulty_result_of_the_evaluation_is_refused(small: Path) -> None:
    peagle("run", "tiny.yaml")
    results = Path("runs/tiny/evaluation/results.json")
    faulty = json.dumps({"sets": {"stdlib": {"offline": {}, "loop": {}}}})
    results.write_text(faulty.ljust(results.stat().st_size))  # of the recorded size, or it is made anew
    _, complaint = peagle("run", "tiny.yaml", code=1)
    assert "set stdlib lacks acceptance_length, per_position" in complaint


def test_recipe_faults_leave_with_2_all_at_once(small: Path) -> None:
    said, complaint = peagle("run", "tiny.yaml", "train.setps=5", "evaluate.k=0", code=2)
    assert said == ""
    assert complaint.startswith("peagle: tiny.yaml: 2 faults\n")
    assert "command line: train.setps: unknown key; did you mean train.steps?" in complaint
    assert not Path("runs").exists()


def test_a_bare_name_is_looked_up_in_recipes(small: Path) -> None:
    Path("recipes").mkdir()
    small.rename("recipes/tiny.yaml")
    said, _ = peagle("prepare", "tiny")
    assert "Next: peagle extract recipes/tiny.yaml" in said
    _, complaint = peagle("prepare", "tinny", code=1)
    assert "did you mean recipes/tiny.yaml?" in complaint


def test_recipe_without_argument_documents_every_key() -> None:
    said, _ = peagle("recipe")
    assert "learning_rate: 0.0001  # a number, greater than 0.0" in said


def test_recipe_checks_a_file_against_its_target(small: Path) -> None:
    said, complaint = peagle("recipe", "tiny.yaml", "train.steps=9")
    assert "\n  steps: 9\n" in said
    assert "no fault found" in complaint
    assert not Path("runs").exists()
    _, complaint = peagle("recipe", "tiny.yaml", "head.aux_layers=[9]", code=2)
    assert "expected at most 4, because ./target has 4 decoder layers" in complaint


def test_push_refuses_what_cannot_be_a_destination(small: Path) -> None:
    Path("head").mkdir()
    assert "expected s3://bucket/prefix" in peagle("push", "head", "ftp://x", code=1)[1]
    assert "found no destination" in peagle("push", "head", code=1)[1]
    assert "found no destination" in peagle("push", "tiny.yaml", code=1)[1]


def test_push_takes_head_and_place_from_a_recipe(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from peagle_train.delivery import push

    calls = []
    monkeypatch.setattr(push, "push_head", lambda head, to, console, force: calls.append((head, to, force)))
    small.write_text(small.read_text() + "push: {to: 's3://bucket/tiny'}\n")
    peagle("push", "tiny.yaml")
    peagle("push", "tiny.yaml", "hf://me/head", "--force")
    assert calls == [
        (Path("runs/tiny/head"), "s3://bucket/tiny", False),
        (Path("runs/tiny/head"), "hf://me/head", True),
    ]


def test_check_refuses_what_is_no_head(small: Path) -> None:
    _, complaint = peagle("check", "nowhere", "--target", "tiny.yaml", code=1)
    assert "no such folder" in complaint
    assert "Traceback" not in complaint


def tiny_head() -> Any:
    from peagle_train.head.config import HeadConfig
    from peagle_train.head.model import DrafterHead
    from peagle_train.head.rope import Rope

    config = HeadConfig(
        hidden_size=64,
        intermediate_size=32,
        num_layers=1,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        vocab_size=300,
        draft_vocab_size=300,
        target_hidden_size=64,
        aux_layers=(1, 2),
        mask_token_id=3,
        rms_norm_eps=1e-5,
        rope=Rope(1e4),
        max_position_embeddings=512,
        own_embeddings=False,
    )
    return DrafterHead(config)


def test_export_writes_a_second_head_beside_the_runs_own(small: Path) -> None:
    from peagle_train.head.io import save_head

    for verb in ("prepare", "extract", "train"):
        peagle(verb, "tiny.yaml")
    Path("runs/tiny/training/best").mkdir()
    save_head(Path("runs/tiny/training/best"), tiny_head())
    peagle("export", "tiny.yaml")
    recorded = {"target": {"reference": "owner/served"}, "provenance": {"run": "tiny"}}
    write_json(Path("runs/tiny/head/export.json"), recorded)

    said, _ = peagle("export", "tiny.yaml", "--format", "speculators", "--out", "heads/tiny")
    assert "wrote heads/tiny (speculators)" in said
    config = read_json(Path("heads/tiny/config.json"))
    assert config["speculators_config"]["verifier"]["name_or_path"] == "owner/served"
    assert read_json(Path("heads/tiny/export.json"))["provenance"] == {"run": "tiny"}
    assert read_json(Path("runs/tiny/head/stage.json"))["parts"]["export.format"] == "plain"
    assert worked == ["prepare", "extract", "train", "export"]

    _, complaint = peagle("export", "tiny.yaml", "--out", "heads/tiny", code=1)
    assert "heads/tiny: found something there" in complaint
    _, complaint = peagle("export", "tiny.yaml", "--format", "x", "--out", "heads/other", code=2)
    assert "export.format: found the text 'x'" in complaint


def test_check_reports_what_was_proven(small: Path) -> None:
    from peagle_train.export.layout import export_head
    from peagle_train.recipe import load_recipe
    from peagle_train.target.source import describe

    facts = describe(load_recipe("tiny.yaml").target)
    export_head(tiny_head(), Path("head"), target=facts)
    said, _ = peagle("check", "head", "--target", "tiny.yaml")
    assert "aux layers        1, 2" in said
    assert "head: no fault found" in said
    Path("head/model.safetensors").write_bytes(b"")
    assert "model.safetensors" in peagle("check", "head", code=1)[1]


def test_import_writes_a_head_and_tells_the_way_on(small: Path) -> None:
    from tests.foreign.publish import amazon

    Path("target/model.safetensors").write_text("")
    amazon(tiny_head(), Path("theirs"))
    said, _ = peagle("import", "theirs", "--target", "tiny.yaml", "--out", "heads/theirs")
    for part in (
        "midlayer.*",
        "Head in heads/theirs",
        "start_from: heads/theirs",
        "Measure it: peagle evaluate tiny.yaml --head heads/theirs",
        "Next: peagle push heads/theirs s3://BUCKET/PREFIX",
    ):
        assert part in said, part
    assert "no fault found" in peagle("check", "heads/theirs", "--target", "tiny.yaml")[0]
    said, _ = peagle(
        "import",
        "heads/theirs",
        "--target",
        "./target",
        "--format",
        "speculators",
        "--k",
        "4",
        "--out",
        "other",
    )
    assert "vllm serve other" in said
    _, complaint = peagle("import", "theirs", "--target", "tiny.yaml", "--out", "other", code=1)
    assert "other: found something there" in complaint


def test_import_refuses_what_it_is_told_wrongly(small: Path) -> None:
    given = ("import", "theirs", "--target", "tiny.yaml", "--out", "heads/theirs")
    assert "expected plain or speculators" in peagle(*given, "--format", "gguf", code=1)[1]
    for text in ("x", "3,2", "", "1,1"):
        assert "expected layer ids that rise" in peagle(*given, "--aux-layers", text, code=1)[1]
    assert "found no such folder" in peagle(*given, code=1)[1]
    assert not Path("heads").exists()


def test_a_head_to_go_on_from_is_held_against_the_recipe_at_once(small: Path) -> None:
    from peagle_train.export.layout import export_head
    from peagle_train.recipe import load_recipe
    from peagle_train.target.source import describe

    export_head(tiny_head(), Path("heads/mine"), target=describe(load_recipe("tiny.yaml").target))
    _, complaint = peagle("recipe", "tiny.yaml", "head.start_from=heads/mine", "head.layers=3", code=2)
    assert "command line: head.layers: found 3; expected 1 as in heads/mine; write head.layers=1" in complaint
    _, complaint = peagle(
        "recipe", "tiny.yaml", "head.start_from=heads/mine", "head.initialise=random", code=2
    )
    assert "head.initialise: found random beside head.start_from" in complaint
    _, complaint = peagle("recipe", "tiny.yaml", "head.start_from=nowhere", code=2)
    assert "head.start_from: nowhere: found no export.json" in complaint


def test_evaluate_measures_another_head(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[Path] = []
    monkeypatch.setattr(pipeline, "evaluate_other", lambda run, head, console: measured.append(head))
    said, _ = peagle("evaluate", "tiny.yaml", "--head", "heads/other")
    assert measured == [Path("heads/other")] and worked == []
    assert "Next: peagle push heads/other" in said


def test_an_unknown_verb_is_answered_with_the_nearest() -> None:
    _, complaint = peagle("trian", code=2)
    assert "train" in complaint


def test_faults_of_ours_keep_their_traceback(small: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(run: Run, name: str, console: Console, **options: Any) -> StageResult:
        raise ZeroDivisionError

    monkeypatch.setattr(pipeline, "run_stage", broken)
    with pytest.raises(ZeroDivisionError):
        peagle("prepare", "tiny.yaml")


def test_the_python_road(small: Path) -> None:
    import peagle_train

    with peagle_train.Run.open("tiny.yaml", ["train.steps=4"], ["notebook"]) as run:
        summary = peagle_train.run_all(run, Console(quiet=True))
    assert summary == json.loads(Path("runs/tiny/summary.json").read_text())
    assert summary["steps"] == 4
    with pytest.raises(peagle_train.PeagleError, match="found no such recipe"):
        peagle_train.load_recipe("nowhere.yaml")
    assert peagle_train.PeagleError is PeagleError
    assert peagle_train.__version__ == "0.1.0"
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        peagle_train.nothing  # noqa: B018


def test_a_reader_that_has_seen_enough_is_no_fault() -> None:
    """`peagle recipe | head -1`: quiet, no advice about disks."""
    done = subprocess.run(
        f"{sys.executable} -c 'from peagle_train.cli import main; main()' recipe | head -1",
        shell=True,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stdout and done.stderr == ""
