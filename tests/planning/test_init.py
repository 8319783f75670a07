"""`peagle init`: what it writes loads, says where each value comes from, and guesses nothing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peagle_train.cli import app
from peagle_train.errors import PeagleError, RecipeError
from peagle_train.planning import plan_recipe
from peagle_train.planning.init import write_recipe
from peagle_train.recipe import check_against_target, load_recipe, read_recipe
from peagle_train.target.known import known
from peagle_train.twin.models import TWINS, tiny_gemma4, tiny_gpt_oss, tiny_llama, tiny_llama3

Twin = Callable[..., Path]


@pytest.mark.parametrize("name", TWINS)
def test_a_recipe_for_every_class_loads_and_can_be_planned(tmp_path: Path, name: str) -> None:
    folder = tmp_path / "target"
    TWINS[name](folder, layers=12) if name != "gemma4_multimodal" else TWINS[name](folder)
    written = write_recipe(str(folder), out=tmp_path / "mine.yaml", name="mine")
    filled = [] if "mask_token: unused" in written.path.read_text() else ["head.mask_token=5"]
    plan = plan_recipe(written.path, filled)
    assert plan.recipe.name == "mine" and plan.facts.model == str(folder)
    assert all(part.good for part in plan.serving)


def test_what_the_config_tells_is_taken_from_it(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "target", layers=12, max_position_embeddings=2048)
    recipe = load_recipe(write_recipe(str(folder), out=tmp_path / "a.yaml").path)
    assert recipe.name == "target" and recipe.head.layers == 4
    assert recipe.head.aux_layers == [2, 6, 9]  # vLLM's rule 2, L // 2, L - 3
    assert recipe.head.mask_token == "unused"  # the twin's table has free rows
    assert recipe.head.draft_vocab_size is None
    assert recipe.data.max_prompt_tokens + recipe.data.max_new_tokens == 2048 == recipe.train.batch_tokens
    shallow = tiny_llama(tmp_path / "shallow", layers=3)
    head = load_recipe(write_recipe(str(shallow), out=tmp_path / "b.yaml").path).head
    assert (head.layers, head.aux_layers) == (3, [1, 3])


def test_peculiarities_are_met(tmp_path: Path) -> None:
    oss = write_recipe(str(tiny_gpt_oss(tmp_path / "oss")), out=tmp_path / "oss.yaml").path
    assert load_recipe(oss).head.intermediate_size == 6 * 64  # the target's own are experts
    assert "served with --disable-hybrid-kv-cache-manager" in oss.read_text()
    gemma = write_recipe(str(tiny_gemma4(tmp_path / "gemma")), out=tmp_path / "gemma.yaml").path
    assert "rope: {rope_type: default}      # the target turns by proportional" in gemma.read_text()
    llama = write_recipe(str(tiny_llama3(tmp_path / "llama3")), out=tmp_path / "llama3.yaml").path
    assert "rope: {rope_type: target}       # llama3, theta 500,000" in llama.read_text()
    windows = tiny_gpt_oss(tmp_path / "windows", layer_types=["sliding_attention"] * 4)
    slides = load_recipe(write_recipe(str(windows), out=tmp_path / "windows.yaml").path).head
    assert (slides.layer_types, slides.sliding_window) == (["sliding_attention"] * 4, 8)


def test_a_full_table_leaves_a_line_to_fill_in(tmp_path: Path) -> None:
    folder = tiny_gemma4(tmp_path / "target")
    written = write_recipe(str(folder), out=tmp_path / "mine.yaml")
    assert "mask_token:                     # FILL IN: Name a reserved token" in written.path.read_text()
    assert any("to fill in before it loads: head.mask_token" in line for line in written.told)
    with pytest.raises(RecipeError, match=r"head\.mask_token: missing"):
        load_recipe(written.path)
    loaded = read_recipe(written.path, ["head.mask_token=<unused0>"])
    entry = known("google/gemma-4-31B-it")
    assert entry is not None and loaded.recipe.head.mask_token == entry.mask_token


def test_no_tokenizer_is_no_reason_to_guess(tmp_path: Path) -> None:
    folder = tiny_llama(tmp_path / "target")
    for file in folder.glob("token*"):
        file.unlink()
    text = write_recipe(str(folder), out=tmp_path / "mine.yaml").path.read_text()
    assert "FILL IN: `unused` if the embedding table has rows without a token" in text


@pytest.mark.parametrize("model", ["openai/gpt-oss-120b", "google/gemma-4-31B-it"])
def test_a_known_target_needs_no_hub(tmp_path: Path, model: str) -> None:
    written = write_recipe(model, out=tmp_path / "mine.yaml", revision="0123abc")
    assert "cannot be had here" in written.told[0]
    entry = known(model)
    assert entry is not None
    recipe = load_recipe(written.path)
    check_against_target(recipe, entry.facts(), "mine")
    assert recipe.target.revision == "0123abc" and recipe.head.mask_token == entry.mask_token
    # The first launch file whose process fits: 16 bytes a parameter of gemma's head do not fit one GPU.
    fits = "fsdp2" if "gemma" in model else "eight_gpus"
    assert recipe.train.launch == f"recipes/accelerate/{fits}.yaml"


def test_a_template_that_writes_the_day_gets_one(tmp_path: Path) -> None:
    oss = load_recipe(write_recipe(str(tiny_gpt_oss(tmp_path / "oss")), out=tmp_path / "oss.yaml").path)
    plain = load_recipe(write_recipe(str(tiny_llama(tmp_path / "llama")), out=tmp_path / "llama.yaml").path)
    assert oss.data.day is not None and plain.data.day is None


def test_nothing_is_written_over_and_what_cannot_be_is_said(tmp_path: Path) -> None:
    def init(*arguments: Any) -> tuple[int, str]:
        result = CliRunner().invoke(app, ["init", *map(str, arguments)])
        return result.exit_code, result.output

    folder, out = tiny_llama(tmp_path / "My Model"), tmp_path / "new" / "mine.yaml"
    code, said = init(folder, "--out", out)
    assert code == 0 and f"Next: peagle plan {out}" in said
    assert load_recipe(out).name == "my-model"
    before = out.read_bytes()
    code, said = init(folder, "--out", out)
    assert code == 1 and "found a file there, which is kept" in said and out.read_bytes() == before
    config = folder / "config.json"
    config.write_text(config.read_text().replace("LlamaForCausalLM", "MistralForCausalLM"))
    code, said = init(folder, "--out", tmp_path / "other.yaml")
    assert code == 1 and "target class MistralForCausalLM: not supported; expected one of" in said
    assert not (tmp_path / "other.yaml").exists()
    code, said = init("nobody/nothing", "--out", tmp_path / "none.yaml")
    assert code == 1 and "target nobody/nothing" in said
    with pytest.raises(PeagleError, match="give --name"):
        write_recipe("nobody/___")
