"""A sound recipe has no failure, and each planted fault is the failure that names it."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from data_prep.chat import ChatRenderer
from data_prep.conversation import Conversation
from peagle_train.cli import app
from peagle_train.doctor import environment, training
from peagle_train.doctor.examine import CHECKS, examine
from peagle_train.doctor.patient import Line
from peagle_train.errors import PeagleError, RecipeError
from peagle_train.export import contract, layout
from peagle_train.head.model import DrafterHead
from peagle_train.target.adapter import Target
from peagle_train.twin.rehearse import rehearse
from tests.tiny_run import tiny_recipe
from tests.twin.recipes import write_recipe

Found = list[tuple[str, Line]]
QUIET = Console(quiet=True)


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama with a head whose embeddings are its own."""
    return tiny_recipe(
        tmp_path_factory.mktemp("doctor"), "twin", heldout=2, train={"positions": 4}, evaluate={"k": 3}
    )


@pytest.fixture(scope="module")
def gpt_oss(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The rehearsal of a gpt-oss recipe: its head turns by YaRN."""
    return rehearse(str(write_recipe(tmp_path_factory.mktemp("gpt_oss"), "gpt_oss")), (), QUIET)


def failures(found: Found) -> dict[str, str]:
    """By check: what is told, with the cure."""
    return {name: f"{line.text}; {line.cure}" for name, line in found if line.level == "failure"}


def not_run(found: Found) -> set[str]:
    return {name for name, line in found if line.level == "not run"}


def diagnosed(recipe: Path, *overrides: str) -> Found:
    return examine(str(recipe), overrides, QUIET)


def test_a_sound_recipe_has_no_failure_and_nothing_of_the_run_is_touched(recipe: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in recipe.parent.rglob("*")}
    result = CliRunner().invoke(app, ["doctor", str(recipe)], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert {path: path.stat().st_mtime_ns for path in recipe.parent.rglob("*")} == before
    for check in CHECKS:
        assert f"{check.name}: " in result.output and f"failure  {check.name}" not in result.output
    assert "the mask token's embedding learns: its gradient is " in result.output
    assert "<|im_start|>assistant\n>>" in result.output  # supervised text, marked


@pytest.mark.parametrize("family", ["gpt_oss", "gemma4"])
def test_the_targets_twins_are_sound(family: str, tmp_path: Path) -> None:
    """Their chat formats, RoPE kinds, windows, softcap, and what the recipes ask."""
    found = diagnosed(rehearse(str(write_recipe(tmp_path, family)), (), QUIET))
    assert failures(found) == {} and not_run(found) == set()
    (turns,) = [line.text for name, line in found if name == "RoPE"]
    assert turns.startswith(
        {"gpt_oss": "the head turns as the target", "gemma4": "the head turns by"}[family]
    )


def test_without_weights_the_rest_is_looked_at(recipe: Path, tmp_path: Path) -> None:
    bare = recipe.parent / "bare"
    bare.mkdir()
    for file in (recipe.parent / "target").iterdir():
        if file.suffix != ".safetensors":
            (bare / file.name).write_bytes(file.read_bytes())
    given = ["doctor", str(recipe), f"target.model={bare}"]
    result = CliRunner().invoke(app, [*given, "--no-weights"], catch_exceptions=False)
    assert result.exit_code == 0 and "ok       prompts: train: 6 rendered" in result.output
    assert result.output.count("not run") == sum(check.weights for check in CHECKS) + 1  # and in the sum
    with_weights = CliRunner().invoke(app, given, catch_exceptions=False)
    assert with_weights.exit_code == 1
    assert "failure  target files" in with_weights.output and "needs config.json and *.safetensors" in (
        with_weights.output
    )


def test_a_faulty_recipe_is_told_as_everywhere(recipe: Path) -> None:
    with pytest.raises(RecipeError, match=r"unknown key; did you mean train\.steps"):
        diagnosed(recipe, "train.stepps=3")
    found = diagnosed(recipe, "head.aux_layers=[1,9]")
    assert "head.aux_layers: found 9; expected at most 4" in failures(found)["target config"]
    assert not_run(found) >= {"target files", "serving", "prompts", "answers", "export"}


# --- What the target is, and what is read of it


def test_aux_ids_off_by_one(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layers = Target.decoder_layers
    monkeypatch.setattr(Target, "decoder_layers", lambda self: [*layers(self)[1:], layers(self)[-1]])
    found = failures(diagnosed(recipe))
    assert "taps: the tap of aux layer 0 differs from hidden_states[0]" in found["target"]


def test_a_distribution_that_is_not_the_models(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    logits = Target.logits
    monkeypatch.setattr(Target, "logits", lambda self, *given: 0.5 * logits(self, *given))
    found = diagnosed(recipe)
    assert "distribution: its logits differ from those of the model's own" in failures(found)["target"]
    assert any(line.text.startswith("taps: ") and line.level == "ok" for _, line in found)


def test_a_rope_that_is_read_wrongly(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dataclasses import replace

    from peagle_train.doctor import target

    describe = target.describe
    monkeypatch.setattr(
        "peagle_train.doctor.target.describe", lambda section: replace(describe(section), rope_scaling=None)
    )
    found = failures(diagnosed(gpt_oss))
    assert "the head turns by theta 150,000, default, but the target's table is up to" in found["RoPE"]


# --- Prompts and masks


def test_a_template_whose_answers_are_never_supervised(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Conversation.rows

    def unsupervised(self: Conversation) -> list[Any]:
        from dataclasses import replace

        return [replace(row, spans=[]) for row in rows(self)]

    monkeypatch.setattr(Conversation, "rows", unsupervised)
    found = diagnosed(recipe)
    assert "9 of 9 rows have an all-zero loss mask" in failures(found)["answers"]
    assert not_run(found) >= {"training steps", "gradients", "export", "load"}


def test_a_template_that_asks_for_the_day(recipe: Path) -> None:
    template = recipe.parent / "target" / "chat_template.jinja"
    text = template.read_text()
    try:
        template.write_text("{{ strftime_now('%Y') }}" + text)
        found = failures(diagnosed(recipe))
    finally:
        template.write_text(text)
    assert set(found) == {"prompts"} and "data.date=YYYY-MM-DD" in found["prompts"]


def test_bad_rows_are_counted_and_too_many_of_them_quoted(recipe: Path, tmp_path: Path) -> None:
    rows = [*({"prompt": f"What is {n}?"} for n in range(20)), {"question": "of another name"}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    given = f"data.train={{source: {tmp_path / 'rows.jsonl'}}}"
    found = examine(str(recipe), [given], QUIET, weights=False)
    assert "1 of 21 rows" in failures(found)["prompts"] and "question" in failures(found)["prompts"]
    found = examine(str(recipe), [given, "data.max_rejects=0.1"], QUIET, weights=False)
    told = [line.text for name, line in found if name == "prompts" and line.level == "warning"]
    assert told == ["1 bad rows are left out, fewer than data.max_rejects allows"]


def test_a_user_who_can_forge_a_turn(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spelled = ChatRenderer.spells_control_token

    def careless(self: ChatRenderer, messages: Any, tools: Any = ()) -> str | None:
        return spelled(self, messages, tools) if messages[0].content.startswith("<") else None

    monkeypatch.setattr(ChatRenderer, "spells_control_token", careless)
    assert "would become a control token (5 texts in all)" in failures(diagnosed(recipe))["control tokens"]


@pytest.mark.parametrize(
    ("token", "told"),
    [
        ("<|im_end|>", "is the tokenizer's pad token"),
        ("42", "the ordinary token"),
        ("9", "the ordinary token"),
    ],
)
def test_a_mask_token_in_use(recipe: Path, token: str, told: str) -> None:
    found = diagnosed(recipe, f"head.mask_token={token}")
    assert told in failures(found)["mask token"]
    assert not_run(found) >= {"mask token in answers", "training steps"}
    assert ("answers", "ok") in {(name, line.level) for name, line in found}


def test_a_mask_token_that_the_target_says(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = Conversation.rows

    def said(self: Conversation) -> list[Any]:
        made = rows(self)
        made[0].token_ids[-1] = 3
        return made

    monkeypatch.setattr(Conversation, "rows", said)
    found = failures(diagnosed(recipe, "head.mask_token=<repo_name>"))
    assert "'<repo_name>' (id 3) occurs in the data" in found["mask token in answers"]


# --- Training


def test_the_mask_tokens_row_never_learns(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where the mask token is the pad row of an nn.Embedding."""
    embed = DrafterHead.embed

    def without(self: DrafterHead, *given: Any, **named: Any) -> Any:
        embeddings, hidden = embed(self, *given, **named)
        return torch.cat([embeddings[:-1], embeddings[-1:].detach()]), hidden

    monkeypatch.setattr(DrafterHead, "embed", without)
    found = failures(diagnosed(recipe))
    assert "the mask token's embedding has a gradient of 0: row" in found["gradients"]


def test_embeddings_that_are_dead(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    embed = DrafterHead.embed

    def dead(self: DrafterHead, *given: Any, **named: Any) -> Any:
        embeddings, hidden = embed(self, *given, **named)
        return embeddings.detach(), hidden

    monkeypatch.setattr(DrafterHead, "embed", dead)
    found = failures(diagnosed(recipe))
    assert "weights do not move: embed_tokens.weight" in found["weights move"]
    assert set(found) == {"weights move", "gradients"}


def test_a_placeholder_that_is_dead(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fuse = DrafterHead.fuse

    def dead(self: DrafterHead, aux: torch.Tensor) -> torch.Tensor:
        hidden = fuse(self, aux)
        return torch.cat([hidden[:-1], hidden[-1:].detach()])

    monkeypatch.setattr(DrafterHead, "fuse", dead)
    assert "mask_hidden has a gradient of 0" in failures(diagnosed(recipe))["gradients"]


def test_norms_that_stay_where_they_were(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with bfloat16 weights that have no float32 masters."""
    copied = training._copy

    def coarse(head: torch.nn.Module) -> Any:
        return {name: t.bfloat16() if t.ndim == 1 else t for name, t in copied(head).items()}

    monkeypatch.setattr("peagle_train.doctor.training._copy", coarse)
    found = failures(diagnosed(recipe, "train.learning_rate=1e-5"))
    assert "norms stay exactly where they were: layers.0.input_layernorm.weight" in found["weights move"]


def test_weights_that_are_not_finite(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied = training._copy

    def broken(head: torch.nn.Module) -> Any:
        return {name: t / 0 if name == "norm.weight" else t for name, t in copied(head).items()}

    monkeypatch.setattr("peagle_train.doctor.training._copy", broken)
    assert "not finite after 2 steps: norm.weight" in failures(diagnosed(recipe))["weights move"]


def test_answers_too_short_to_teach(recipe: Path) -> None:
    found = failures(diagnosed(recipe, "data.max_new_tokens=1"))
    assert "0 training and 0 validation rows have a trainable chain" in found["training steps"]


# --- Export


def test_a_rope_that_is_lost_at_the_export(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contract, "_rope_keys", lambda rope: {"rope_theta": rope.theta})
    found = diagnosed(gpt_oss)
    assert "rope" in failures(found)["export"].lower()
    assert not_run(found) >= {"exported RoPE", "load"}


def test_a_rope_that_is_lost_behind_the_checks(gpt_oss: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing but the table itself tells."""
    _after_export(monkeypatch, "config.json", lambda config: config.pop("rope_scaling"))
    assert "vLLM will turn by theta 150,000, default, up to" in failures(diagnosed(gpt_oss))["exported RoPE"]


def test_an_export_that_changes_afterwards(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _after_export(monkeypatch, "config.json", lambda config: config.update(ptd_token_id=1))
    assert "config.json" in failures(diagnosed(recipe))["load"]


def _after_export(monkeypatch: pytest.MonkeyPatch, name: str, edit: Any) -> None:
    written = layout.export_head

    def export(head: DrafterHead, directory: Path, **settings: Any) -> Any:
        report = written(head, directory, **settings)
        value = json.loads((directory / name).read_text())
        edit(value)
        (directory / name).write_text(json.dumps(value))
        return report

    monkeypatch.setattr("peagle_train.doctor.delivery.export_head", export)


# --- The machine


def test_what_the_recipe_needs_is_asked_for(
    recipe: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = [str(recipe), "train.backend=flash", "train.launch=nowhere.yaml", "states.backend=vllm"]
    monkeypatch.delenv("VLLM_PYTHON", raising=False)
    found = examine(given[0], given[1:], QUIET, weights=False)
    told = "\n".join(line.text for name, line in found if name == "packages" and line.level == "failure")
    assert "flash_attn is not installed; train.backend flash needs it" in told
    assert "train.launch: nowhere.yaml is no file" in told
    assert "VLLM_PYTHON names no interpreter" in told
    monkeypatch.setenv("VLLM_PYTHON", str(tmp_path / "python"))
    found = examine(given[0], given[1:], QUIET, weights=False)
    assert "does not run" in failures(found)["packages"]


def test_a_gpu_that_is_not_there(recipe: Path) -> None:
    found = examine(str(recipe), ["target.device=cuda"], QUIET, weights=False)
    assert "finds no GPU" in failures(found)["environment"] and "TORCH=cuda" in failures(found)["environment"]


def test_a_check_that_stumbles_is_told_and_the_rest_runs(
    recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stumbles(patient: Any) -> Iterator[Line]:
        raise RuntimeError("an operator is not implemented")
        yield

    monkeypatch.setattr(environment, "room", stumbles)
    stream = io.StringIO()
    found = examine(str(recipe), (), Console(file=stream, width=300), weights=False)
    told = failures(found)
    assert told["disk and memory"].startswith("RuntimeError: an operator is not implemented; ")
    assert set(told) == {"disk and memory"} and "1 failure" in stream.getvalue()


def test_a_fault_of_the_users_is_told_in_its_own_words(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def faulty(patient: Any) -> Iterator[Line]:
        raise PeagleError("found this; expected that; do so")
        yield

    monkeypatch.setattr(environment, "room", faulty)
    assert failures(examine(str(recipe), (), QUIET, weights=False))["disk and memory"] == (
        "found this; expected that; do so; "
    )
