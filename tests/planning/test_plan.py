"""A plan: every figure against what the run itself would come to, every refusal, every warning."""

from __future__ import annotations

import io
import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from rich.console import Console
from typer.testing import CliRunner

from peagle_train import Run
from peagle_train.cli import app
from peagle_train.errors import PeagleError
from peagle_train.head.alignment import trainable_depths
from peagle_train.head.batch import Document, pack
from peagle_train.head.model import DrafterHead
from peagle_train.head.sampling import kept_shares, sample_depths
from peagle_train.pipeline import run_stage
from peagle_train.planning import Options, Plan, in_short, plan_recipe, print_plan, require
from peagle_train.planning.lengths import cut_share, lengths_of
from peagle_train.planning.ranks import read_launch
from peagle_train.planning.work import operations
from peagle_train.recipe import load_recipe
from peagle_train.store.answers import AnswerStore
from peagle_train.store.states import StateStore
from peagle_train.target.known import AnswerTokens
from peagle_train.training.data import Stream
from scripts.side_by_side.floor import operations as counted
from tests.tiny_run import tiny_recipe

MEASURED = AnswerTokens(median=3891, p90=10_800, source="a test")


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny recipe that nothing has been done for."""
    folder = tmp_path_factory.mktemp("planned")
    return tiny_recipe(folder, "tiny", heldout=4, train={"positions": 5, "batch_tokens": 128})


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny recipe whose answers and states are there."""
    folder = tmp_path_factory.mktemp("answered")
    path = tiny_recipe(folder, "tiny", heldout=4, train={"positions": 5, "batch_tokens": 40})
    with Run.open(path) as run:
        for stage in ("prepare", "extract"):
            run_stage(run, stage, Console(quiet=True))
    return path


def test_a_plan_before_anything_is_there_takes_the_bounds(recipe: Path) -> None:
    plan = plan_recipe(recipe, ["data.train.count=8", "data.validation.count=4", "data.heldout.sums.count=4"])
    data = plan.recipe.data
    assert plan.lengths.train.longest == data.max_prompt_tokens + data.max_new_tokens
    assert plan.lengths.train.mean_row == plan.lengths.train.longest and not plan.lengths.exact
    assert plan.answer_tokens == 16 * data.max_new_tokens
    assert plan.work.longest == plan.lengths.train.longest - 2
    assert plan.work.epochs == 12 / 4  # each row has a micro-batch of its own, two of them a step
    assert not run_exists(plan)


def run_exists(plan: Plan) -> bool:
    return (Path(plan.recipe.output) / plan.recipe.name).exists()


def test_finished_answers_are_counted_one_by_one(answered: Path) -> None:
    plan = plan_recipe(answered)
    run = Path(plan.recipe.output) / plan.recipe.name
    rows = AnswerStore(run / "answers").rows("train")
    assert plan.lengths.exact and plan.lengths.train.rows == 8
    assert plan.lengths.train.mean_row == sum(len(row.token_ids) for row in rows) / 8
    assert plan.lengths.train.cut == sum(row.finish == "length" for row in rows) / 8
    slots = [len(row.token_ids) - 2 for row in rows]
    stream = Stream(range(8), slots, 0, batch_tokens=40)
    assert plan.work.steps_per_epoch == len(stream.epoch(0)) / 2
    assert plan.work.longest == stream.longest
    assert plan.disk.states == plan.disk.states_at_most
    stored = sum(t.nbytes for row in StateStore(run / "states").info() for t in states_of(run, row.row))
    assert plan.disk.states == pytest.approx(stored, rel=0.02)


def states_of(run: Path, row: int) -> list[torch.Tensor]:
    stored = StateStore(run / "states").read(row)
    return [stored.aux, stored.last, stored.token_ids]


def test_answers_of_another_recipe_are_not_counted(answered: Path) -> None:
    assert not plan_recipe(answered, ["data.max_new_tokens=30"]).lengths.exact


def test_the_head_is_the_one_that_will_be_trained(recipe: Path) -> None:
    plan = plan_recipe(recipe)
    head = DrafterHead(plan.head.head.config)
    assert plan.head.total == sum(p.numel() for p in head.parameters())
    assert plan.head.trained == plan.head.total
    shared = plan_recipe(recipe, ["head.embeddings=shared", "head.output=frozen"])
    table, output = head.embed_tokens.weight.numel(), head.lm_head.weight.numel()
    assert shared.head.trained == plan.head.total - table - output
    assert plan.head.exported - shared.head.exported == 2 * table
    assert all(p.is_meta for p in plan.head.head.parameters())


def test_of_a_conversation_answered_turn_by_turn_everything_may_be_answers(recipe: Path) -> None:
    last, each = (
        plan_recipe(recipe, [f"data.turns={turns}", "data.train.count=8"]) for turns in ("last", "each")
    )
    assert each.lengths.train.longest == last.lengths.train.longest
    assert each.lengths.train.mean_answer == each.lengths.train.longest - 1
    assert each.disk.states > last.disk.states
    assert "each answer has a row" in each.lengths.source


def test_measured_lengths_follow_their_median_and_decile() -> None:
    lengths = lengths_of(load_recipe("gpt-oss-20b"), MEASURED)
    answers = sorted(answer for _, answer in lengths.train.sample)
    assert answers[500] == pytest.approx(3891, rel=0.01)
    cut = sum(answer == 7168 for answer in answers) / len(answers)
    assert lengths.train.cut == pytest.approx(cut, abs=0.002) and 0.2 < cut < 0.25
    assert cut_share(MEASURED, 10_800) == pytest.approx(0.1)
    assert math.isclose(cut_share(MEASURED, 3891), 0.5)


def test_operations_are_those_that_side_by_side_counts_for_a_batch(recipe: Path) -> None:
    """Up to the chains that end with the row, and the elements of own chains."""
    plan = plan_recipe(recipe, ["head.layers=2"])
    config = replace(plan.head.head.config, vocab_size=300, draft_vocab_size=300)
    prompt, answer = 40, 400
    mask = torch.arange(prompt + answer) >= prompt
    kept = sample_depths(trainable_depths(mask), 4, 0.8, 0.0, torch.Generator().manual_seed(0))
    ids = torch.zeros(len(mask), dtype=torch.int64)
    width = config.target_hidden_size
    states = torch.zeros(len(mask) - 1, 3 * width), torch.zeros(len(mask) - 1, width)
    exact = counted(config, pack([Document(ids, *states, kept)]))
    total = sum(exact.linear.values()) + sum(exact.attention.values())
    assert operations(config, prompt, answer, kept_shares(4, 0.8)) == pytest.approx(total, rel=0.03)


def test_hours_are_tokens_over_a_rate(recipe: Path) -> None:
    plan = plan_recipe(recipe, ["data.train.count=8"], Options(rate=10.0, answer_rate=5.0))
    assert plan.hours.train == pytest.approx(plan.work.tokens / 10 / 3600)
    assert plan.hours.answer == pytest.approx(plan.answer_tokens / 5 / 3600)
    assert plan.hours.train_rate == "10 tokens/s, as given"
    assert "measured" in plan_recipe(recipe).hours.train_rate


def test_each_launch_file_has_its_rank() -> None:
    plan = plan_recipe("gpt-oss-20b", (), Options(gpu_memory=80))
    by_name = {rank.launch.name: rank for rank in plan.ranks}
    assert next(iter(by_name)) == "eight_gpus.yaml" and len(by_name) == 6
    kinds = {name: (rank.launch.kind, rank.launch.processes) for name, rank in by_name.items()}
    assert kinds["fsdp2.yaml"] == ("fsdp2", 8) and kinds["deepspeed_zero3.yaml"] == ("zero3", 8)
    assert kinds["one_gpu.yaml"] == ("one", 1) and kinds["two_nodes.yaml"] == ("ddp", 16)
    ddp, split = by_name["eight_gpus.yaml"].plan, by_name["fsdp2.yaml"].plan
    assert ddp is not None and split is not None
    # Gradients and two moments, against whole sums of gradients and an eighth of the moments.
    trained = 4 * plan.head.trained
    assert ddp.states == 3 * trained and split.states == trained + 2 * trained // 8


def test_what_does_not_fit_is_refused_and_planned_anyway(disk: Callable[[float], None]) -> None:
    disk(1e9)
    plan = plan_recipe("gpt-oss-20b", (), Options(gpu_memory=24))
    with pytest.raises(PeagleError) as caught:
        require(plan, anyway=False)
    for part in (
        "eight_gpus.yaml: train.memory: a batch of 8,192 tokens needs",
        "output: runs/gpt-oss-20b needs about",
        "1.0 GB free; set `output` to a larger disk",
        "states.mode=bounded",
    ):
        assert part in str(caught.value)
    require(plan, anyway=True)
    disk(100e12)
    require(plan_recipe("gpt-oss-20b", (), Options(gpu_memory=80)), anyway=False)


@pytest.mark.parametrize(
    ("overrides", "states"),
    [
        (["states.url=s3://bucket/states"], True),
        (["states.mode=bounded", "states.cap=2", "states.backend=hf"], True),
        (["states.mode=online", "states.backend=hf"], False),
    ],
)
def test_states_elsewhere_or_under_a_cap_need_no_disk(overrides: list[str], states: bool) -> None:
    plan = plan_recipe("gpt-oss-20b", overrides)
    assert plan.disk.needed < 0.1e12
    assert bool(plan.disk.states) == states


def test_a_head_that_falls_into_several_groups_is_told_its_flag() -> None:
    plan = plan_recipe("gpt-oss-20b", ["head.layers=8"])
    (groups,) = [part for part in plan.serving if part.name == "KV cache groups"]
    assert groups.good and "served with --disable-hybrid-kv-cache-manager" in groups.text


WARNINGS: list[tuple[list[str], str]] = [
    (["train.positions=7"], "GPT-OSS-20B-P-EAGLE was trained for 10"),
    (["evaluate.k=9"], "was reported at 7: to compare, evaluate.k=7"),
    (["data.max_new_tokens=2000"], "data.max_new_tokens: 2,000 cuts 80 % of the training answers"),
    (["train.steps=100", "train.warmup_steps=1"], "rows are answered and stored that nobody trains on"),
    (["train.steps=200000"], "raise data.train.count, or set train.patience"),
    (["states.dtype=float16", "target.dtype=float32"], "states.dtype: float16 ends at 65,504"),
    (["train.precision=fp32"], "train.precision: fp32 on a GPU"),
    (["target.device=cpu"], "train.precision: bf16 on a CPU"),
    (["target.dtype=float32"], "target.dtype: float32 doubles"),
    (["data.decontaminate=[humaneval]"], "gsm8k-test, mt-bench is reported on"),
    (["data.validation={source: ultrachat, split: validation}"], "name data.validation.count"),
    (["states.mode=online", "states.backend=hf"], "states.mode: online runs the target beside the training"),
]


@pytest.mark.parametrize(("overrides", "said"), WARNINGS, ids=[said[:30] for _, said in WARNINGS])
def test_what_will_be_regretted_is_a_warning_with_its_cure(overrides: list[str], said: str) -> None:
    found = [text for text in plan_recipe("gpt-oss-20b", overrides).warnings if said in text]
    assert len(found) == 1 and ":" in found[0]


def test_a_launch_file_that_is_none_is_refused(tmp_path: Path) -> None:
    with pytest.raises(PeagleError, match="no such launch file; expected one of accelerate's, for example"):
        read_launch(tmp_path / "none.yaml")
    for text, message in (
        ("- a", "found no keys"),
        ("a: [", "not readable as YAML"),
        ("distributed_type: MEGATRON_LM\nnum_processes: 2", "distributed_type MEGATRON_LM"),
    ):
        (tmp_path / "launch.yaml").write_text(text)
        with pytest.raises(PeagleError, match=message):
            read_launch(tmp_path / "launch.yaml")


def test_the_tables_and_the_line_say_what_matters() -> None:
    plan = plan_recipe("gpt-oss-20b", ["evaluate.k=9"], Options(gpu_memory=80, answer_rate=10_000))
    console = Console(record=True, width=160, file=io.StringIO())
    print_plan(plan, console)
    text = console.export_text()
    for part in (
        "note: the config.json of openai/gpt-oss-20b cannot be had here",
        "1,901,298,240, of which 1,901,298,240 are trained",
        "5.80 TB, at most 9.27 TB (stored)",
        "22.2 % at data.max_new_tokens",
        "about 5.9 hours",
        "assumed: 150 TFLOP/s a GPU",
        "eight_gpus.yaml (cuda)",
        "the head's 4 layers share one",
        "yarn, theta 150,000; as the target's",
        "warning: evaluate.k: 9",
    ):
        assert part in text, part
    line = in_short(plan)
    assert "\n" not in line and "head 1.90 B, 1.90 B trained; 56.2 GiB a process (eight_gpus.yaml)" in line


def test_the_command_prints_json_and_leaves_with_an_error_for_what_cannot_be(
    recipe: Path, disk: Callable[[float], None]
) -> None:
    def plan(*options: str) -> tuple[int, str, str]:
        result = CliRunner().invoke(app, ["plan", str(recipe), *options])
        return result.exit_code, result.stdout, result.stderr

    code, out, _ = plan("--json", "--rate", "100")
    found: dict[str, Any] = json.loads(out)
    assert code == 0 and found["work"]["rate"] == "100 tokens/s, as given"
    assert found["memory"][0]["peak_bytes"] > 0 and found["refusals"] == []
    assert not (recipe.parent / "runs").exists()
    disk(1000)
    code, _, complaint = plan()
    assert code == 1 and "this cannot be done as it stands" in complaint
    code, out, _ = plan("--anyway")
    assert code == 0 and "cannot be: output:" in out
    code, _, complaint = plan("--rate", "0")
    assert code == 1 and "--rate: found 0; expected a number above 0" in complaint


def test_the_recipe_verb_says_when_sizes_are_those_known_here() -> None:
    result = CliRunner().invoke(app, ["recipe", "qwen3-coder"])
    assert result.exit_code == 0 and "note: the config.json of Qwen/" in result.stderr
    assert yaml.safe_load(result.stdout)["head"]["aux_layers"] == [2, 24, 45]
