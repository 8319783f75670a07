"""A recipe for a large target becomes one for a laptop, and no more of it changes than must."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from peagle_train import Run, run_all
from peagle_train.cli import app
from peagle_train.errors import PeagleError
from peagle_train.export.serving import serving_flags
from peagle_train.head.io import load_head
from peagle_train.recipe import load_recipe
from peagle_train.recipe.schema import TargetSection
from peagle_train.target.adapter import Target
from peagle_train.target.source import describe
from peagle_train.twin.make import Original, original_of, twin_of
from peagle_train.twin.mapping import aux_layers_of, rehearsal_of
from peagle_train.twin.models import TWINS
from peagle_train.twin.prompts import row
from peagle_train.twin.rehearse import rehearse
from tests.data_prep.inline import InlineJobs
from tests.twin.recipes import MODELS, write_recipe

LARGE = {
    "count", "decontaminate", "max_prompt_tokens", "max_new_tokens", "batch_size", "workers", "server", "mix",
    "source", "split", "columns", "layers", "aux_layers", "steps", "batch_tokens", "warmup_steps", "memory",
    "launch", "validate_every", "checkpoint_every", "precision", "backend", "model", "revision", "dtype",
    "device", "url", "draft_vocab_size", "num_key_value_heads", "head_dim", "name", "log_with", "entity",
    "loop_prompts", "to",
}  # fmt: skip


@pytest.mark.parametrize("family", sorted(MODELS))
def test_only_what_is_large_or_far_away_changes(family: str, tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, family))
    rehearsal = rehearsal_of(recipe, original_of(recipe.target), tmp_path)
    keys = {change.key for change, _ in rehearsal.changes}
    assert {key.rpartition(".")[2] for key in keys} <= LARGE
    before, after = recipe.model_dump(mode="json"), rehearsal.values
    for key, value in _flat(before):
        if not any(key == name or key.startswith(f"{name}.") for name in keys):
            assert dict(_flat(after))[key] == value, key
    for key in ("data.sampling", "data.turns", "data.date", "data.system_prompt", "train.cod", "head.rope"):
        section, name = key.split(".")
        assert after[section][name] == before[section][name], key
    assert after["evaluate"]["k"] == 5 and after["train"]["positions"] == 8


@pytest.mark.parametrize("family", sorted(MODELS))
def test_the_written_recipe_is_valid_and_its_head_has_one_kv_group(family: str, tmp_path: Path) -> None:
    path = rehearse(str(write_recipe(tmp_path, family)), (), Console(quiet=True))
    assert path == tmp_path / "runs" / f"{family.replace('_', '-')}-twin" / "twin" / "recipe.yaml"
    with Run.open(path) as run:  # held against the twin as every recipe is against its target
        facts = run.facts
        original = original_of(TargetSection(model=MODELS[family]))
        assert facts.class_name == original.class_name
        assert run.recipe.head.layers == 2 and run.directory == path.parent.parent
        from peagle_train.recipe.head import head_config

        head = head_config(run.recipe, facts, 0, run.recipe.head.draft_vocab_size or facts.vocab_size)
    assert serving_flags(head, facts.kv_layers) == ()
    assert not list(tmp_path.glob("runs/*/answers"))


def test_sources_on_this_machine_stay(tmp_path: Path) -> None:
    (tmp_path / "mine.jsonl").write_text('{"prompt": "Hi"}\n')
    mine = {"source": str(tmp_path / "mine.jsonl"), "count": 2000}
    path = write_recipe(
        tmp_path,
        "qwen3_moe",
        **{"data.train": mine, "data.validation": {"source": "stdlib", "split": "train"}},
    )
    recipe = load_recipe(path)
    values = rehearsal_of(recipe, original_of(recipe.target), tmp_path).values["data"]
    assert values["train"]["source"] == mine["source"] and values["train"]["count"] == 24
    assert (values["validation"]["source"], values["validation"]["split"]) == ("stdlib", "train")
    assert values["heldout"]["chat"]["source"] == str(tmp_path / "prompts" / "heldout.chat-0.jsonl")
    assert values["decontaminate"] == ["humaneval"]


def test_what_the_twins_template_does_not_read_is_left_out(tmp_path: Path) -> None:
    variables = {"enable_thinking": True, "of_this_model_alone": 3}
    path = write_recipe(
        tmp_path, "gemma4", **{"data.template_variables": variables, "data.date": "2025-06-28"}
    )
    recipe = load_recipe(path)
    values = rehearsal_of(recipe, original_of(recipe.target), tmp_path).values["data"]
    assert values["template_variables"] == {"enable_thinking": True} and values["date"] is None


@pytest.mark.parametrize(
    ("layers", "depth", "twin_depth", "expected"),
    [
        ([2, 12, 21], 24, 8, [2, 4, 5]),  # vLLM's rule on both
        ([2, 24, 45], 48, 8, [2, 4, 5]),
        ([2, 30, 57], 60, 12, [2, 6, 9]),
        ([0, 12, 24], 24, 8, [0, 4, 8]),  # the embeddings and the last layer
        ([1, 2, 3, 12, 20, 22, 23, 24], 24, 8, [1, 2, 3, 4, 5, 6, 7, 8]),
    ],
)
def test_taps_keep_their_rule(layers: list[int], depth: int, twin_depth: int, expected: list[int]) -> None:
    assert aux_layers_of(layers, depth, twin_depth) == expected


@pytest.mark.parametrize("kind", sorted(TWINS))
def test_every_class_has_its_twin(kind: str, tmp_path: Path) -> None:
    facts = describe(TargetSection(model=str(TWINS[kind](tmp_path / "original"))))
    recipe = load_recipe(write_recipe(tmp_path, "gpt_oss"))
    rope_type = (facts.rope_scaling or {}).get("rope_type", "default")
    original = Original(facts.class_name, 24, 2048, 100_000, rope_type)
    twin = twin_of(recipe, original, [None, None])
    assert twin.kind == kind
    assert twin.write(tmp_path / "twin") and not twin.write(tmp_path / "twin")
    target = Target.load(tmp_path / "twin", dtype="float32", device="cpu")
    assert target.facts.kv_layers == twin.facts.kv_layers
    assert (target.facts.rope_scaling or {}).get("rope_type", "default") == rope_type
    assert target.facts.logit_softcap == facts.logit_softcap


def test_a_class_without_a_twin_is_told(tmp_path: Path) -> None:
    recipe = load_recipe(write_recipe(tmp_path, "gpt_oss"))
    with pytest.raises(PeagleError, match="GraniteForCausalLM has no twin; expected one of LlamaForCausalLM"):
        twin_of(recipe, Original("GraniteForCausalLM", 24, 2048, 100_000), [None])


def test_prompts_of_two_files_share_nothing() -> None:
    rows = [json.dumps(row(number)) for number in (*range(1000, 1024), *range(2000, 2024))]
    assert len(set(rows)) == len(rows)


def test_twin_is_a_verb_and_refuses_a_folder_that_is_taken(tmp_path: Path) -> None:
    recipe, out = str(write_recipe(tmp_path, "qwen3_moe")), tmp_path / "model"
    made = CliRunner().invoke(app, ["twin", recipe, "--out", str(out)])
    assert made.exit_code == 0 and "Qwen3MoeForCausalLM with random weights, 8 layers" in made.output
    assert describe(TargetSection(model=str(out))).num_layers == 8
    again = CliRunner().invoke(app, ["twin", recipe, "--out", str(out)])
    assert again.exit_code == 1 and "found something there" in again.output


@pytest.mark.parametrize(("given", "rehearsed"), [((), False), (("TWIN=1",), True), (("TWIN=0",), False)])
def test_make_train_rehearses(given: tuple[str, ...], rehearsed: bool) -> None:
    root = Path(__file__).resolve().parents[2]
    command = ["make", "--dry-run", "--always-make", "train", "MODEL=mine", *given, "ARGS=train.steps=9"]
    told = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
    line = ".venv/bin/peagle run recipes/mine.yaml " + "--twin " * rehearsed + "train.steps=9"
    assert line in told.splitlines()


@pytest.mark.parametrize("family", ["gemma4", "gpt_oss"])
def test_the_road_holds_from_prompts_to_acceptance(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`peagle run RECIPE --twin`, its workers in this process."""
    monkeypatch.setattr("data_prep.prepare.run_jobs", InlineJobs())
    monkeypatch.setattr("data_prep.extract.run_jobs", InlineJobs())
    recipe = write_recipe(tmp_path, family, **{"data.max_new_tokens": 12})
    given = ["train.steps=6", "train.warmup_steps=0"]
    result = CliRunner().invoke(app, ["run", str(recipe), "--twin", *given], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    room = tmp_path / "runs" / f"{family.replace('_', '-')}-twin"
    summary = json.loads((room / "summary.json").read_text())
    assert set(summary["stages"]) == {"prepare", "extract", "train", "export", "evaluate"}
    assert summary["sets"]["chat"]["loop"]["lossless"] is True
    assert not summary["stages"]["extract"]["skipped"]  # the recipe keeps no states while answering
    head = load_head(room / "training" / "best").config
    assert head.num_layers == 2 and head.own_embeddings is (family == "gpt_oss")
    assert head.rope.rope_type == {"gemma4": "default", "gpt_oss": "yarn"}[family]
    with Run.open(room / "twin" / "recipe.yaml") as run:
        again = run_all(run, Console(quiet=True))
    assert all(stage["skipped"] for stage in again["stages"].values())


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    if not isinstance(value, dict) or not value:
        return [(prefix, value)]
    return [
        pair for name, item in value.items() for pair in _flat(item, f"{prefix}.{name}" if prefix else name)
    ]
