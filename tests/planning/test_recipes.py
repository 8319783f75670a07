"""The recipes of the four targets: they can be carried out, and what is written about them is true."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from peagle_train.planning import Options, Plan, plan_recipe
from peagle_train.recipe import load_recipe
from peagle_train.target.known import known

TARGETS = ("gpt-oss-20b", "gpt-oss-120b", "qwen3-coder", "gemma-4-31b")
NAMES = [name + suffix for name in TARGETS for suffix in ("", "-long")]
README = Path("recipes/README.md")
Planned = Callable[..., Plan]


@pytest.fixture
def plan(disk: Callable[[float], None]) -> Planned:
    disk(100e12)
    return lambda name, *overrides: plan_recipe(name, overrides, Options(gpu_memory=80))


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_can_be_carried_out_as_it_stands(plan: Planned, name: str) -> None:
    found = plan(name)
    assert found.refusals == []
    assert found.warnings == []
    assert found.note is not None  # its sizes are those known here
    assert all(part.good for part in found.serving)
    assert found.chosen.plan is not None and found.chosen.plan.peak <= found.chosen.plan.budget
    assert found.work.epochs is not None and 1 <= found.work.epochs <= 4


@pytest.mark.parametrize("name", NAMES)
def test_every_choice_has_its_source_beside_it(name: str) -> None:
    """A number without a reason is one that nobody dares to change."""
    text = Path(f"recipes/{name}.yaml").read_text()
    for key in (
        "aux_layers",
        "layers",
        "positions",
        "cod",
        "mask_token",
        "learning_rate",
        "warmup_steps",
        "batch_tokens",
        "max_new_tokens",
        "mix",
        "embeddings",
        "k",
    ):
        line = re.search(rf"^ +{key}:.*$", text, re.M)
        assert line is not None and "#" in line[0], key
    assert "rope" in text and "draft_vocab" in text


@pytest.mark.parametrize("name", TARGETS)
def test_a_long_recipe_differs_in_data_and_lengths_alone(name: str) -> None:
    short, long = (load_recipe(f"{name}{suffix}").model_dump() for suffix in ("", "-long"))
    assert short.pop("name") + "-long" == long.pop("name")
    for recipe in (short, long):
        recipe.pop("data")
        recipe["states"].pop("batch_tokens")
        for key in ("steps", "batch_tokens", "warmup_steps", "validate_every", "checkpoint_every"):
            recipe["train"].pop(key)
    assert short == long


@pytest.mark.parametrize("name", TARGETS)
def test_a_recipe_trains_what_the_published_head_is_served_with(name: str) -> None:
    recipe = load_recipe(name)
    entry = known(recipe.target.model)
    assert entry is not None and recipe.head.mask_token == entry.mask_token
    assert recipe.head.layers == 4 and recipe.train.cod.rate == 0.8
    depth = entry.facts().num_layers
    assert recipe.head.aux_layers == [2, depth // 2, depth - 3]
    if entry.published is not None and entry.published.positions is not None:
        assert recipe.train.positions == entry.published.positions
        assert recipe.evaluate.k == entry.published.k


def row_of(found: Plan) -> str:
    """A line of the README's table."""
    recipe, lengths, disk = found.recipe, found.lengths.train, found.disk
    assert found.chosen.plan is not None and lengths.rows is not None
    cells = [
        f"`{recipe.name}`",
        f"{found.head.total / 1e9:.2f} B",
        f"{found.head.head.config.draft_vocab_size:,}",
        str(recipe.train.positions),
        f"{recipe.train.learning_rate:g}",
        f"{lengths.rows:,}",
        f"{lengths.longest:,}",
        f"{lengths.mean_row:,.0f}",
        f"{disk.states / 1e12:.2f} TB",
        f"{found.work.steps:,}",
        f"{found.work.epochs:.2f}",
        f"{found.hours.train:.1f}",
        f"{found.chosen.plan.peak / 2**30:.1f}",
        found.chosen.launch.name.removesuffix(".yaml"),
    ]
    return f"| {' | '.join(cells)} |"


@pytest.mark.parametrize("name", NAMES)
def test_the_readme_tells_what_the_plan_prints(plan: Planned, name: str) -> None:
    assert row_of(plan(name)) in README.read_text().splitlines()


@pytest.mark.parametrize(
    ("row", "prompt"), [(2048, 512), (4096, 1024), (8192, 1024), (20480, 2048)], ids=lambda value: str(value)
)
def test_the_docs_tell_what_a_length_costs(plan: Planned, row: int, prompt: int) -> None:
    found = plan(
        "gpt-oss-20b",
        f"data.max_prompt_tokens={prompt}",
        f"data.max_new_tokens={row - prompt}",
        f"train.batch_tokens={row}",
    )
    lengths = found.lengths.train
    assert lengths.cut is not None and found.chosen.plan is not None
    line = (
        f"| {row:,} | {100 * lengths.cut:.0f} % | {lengths.mean_answer:,.0f} "
        f"| {found.disk.states / 1e12:.2f} TB | {found.chosen.plan.peak / 2**30:.1f} |"
    )
    assert line in Path("docs/planning.md").read_text().splitlines()
