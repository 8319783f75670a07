"""The whole road on twins: prompts to head by `peagle run --twin`, then a real vLLM drafts what we draft.

Each family's recipe is in the shape of its real target's: its own chat format with a system prompt, template
variables, ways of asking, mask token and RoPE of the head. Prompts for vLLM are the run's own held-out ones,
as the target's chat template rendered them. For Gemma 4 the text class stands in (docs/targets.md).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from peagle_train import Run
from peagle_train.cli import app
from peagle_train.evaluation.loop import first_difference, greedy
from peagle_train.export.layout import read_head
from peagle_train.head.acceptance import Acceptance
from peagle_train.store import AnswerStore
from peagle_train.target.adapter import Target
from peagle_train.twin import models as twins
from tests.data_prep.inline import InlineJobs
from tests.twin.recipes import write_recipe
from tests.vllm.conftest import RUNNER, Case, Ground, collect, make_job, started, submit
from tests.vllm.matrix import Layout, Spec
from tests.vllm.test_vllm import TIE, compare_drafts

pytestmark = pytest.mark.vllm

K, NEW_TOKENS = 5, 20
AT_ONCE = 900
"""Prompt tokens; vLLM reads 1,024 in a step (vllm_runner.py), and drafts oddly for a prompt cut in two."""
QUICK = ("train.steps=10", "train.warmup_steps=0", "data.train.count=12")


@dataclass(frozen=True)
class Family:
    """recipe: which of tests/twin/recipes.py. original: the class it is for, where that is another one."""

    recipe: str
    original: str | None = None
    aux: tuple[int, ...] = (2, 6, 9)


FAMILIES = {
    "GptOss": Family("gpt_oss"),
    "Qwen3Moe": Family("qwen3_moe"),
    "Gemma4": Family("gemma4", original="gemma4"),
    "Llama": Family("qwen3_moe", original="llama3"),
}


@pytest.fixture(scope="module")
def cases(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Case]:
    """Every family's run, and what vLLM drafted; it imports on one core while we train on the other."""
    room = tmp_path_factory.mktemp("end to end")
    found: dict[str, Case] = {}
    with started(vllm_python, RUNNER, room) as process:
        for name, family in FAMILIES.items():
            case, job = _road(room / name, name, family)
            found[name] = case
            submit(process, job)
        for name, result in collect(process, room).items():
            found[name].result = result
    return found


def _road(room: Path, name: str, family: Family) -> tuple[Case, dict[str, Any]]:
    """Runs every stage of a rehearsal; returns what it came to, and the job for vLLM."""
    room.mkdir()
    changes: dict[str, Any] = {"data.turns": "last"}
    if family.original is not None:
        original = twins.tiny(family.original, room / "original", layers=12, vocab=448)
        changes |= {"target.model": str(original), "target.revision": None, "head.aux_layers": [*family.aux]}
        if family.original == "llama3":
            reserved = "<|reserved_special_token_0|>"
            changes |= {"data.date": "2025-06-28", "head.mask_token": reserved, "head.drafter": "llama"}
    recipe = write_recipe(room, family.recipe, **changes)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("data_prep.prepare.run_jobs", InlineJobs())
        patch.setattr("data_prep.extract.run_jobs", InlineJobs())
        result = CliRunner().invoke(app, ["run", str(recipe), "--twin", *QUICK], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    (twin_recipe,) = room.glob("runs/*/twin/recipe.yaml")
    with Run.open(twin_recipe) as run:
        folder = Path(run.recipe.target.model)
        target = Target.load(folder, dtype="float32", device="cpu")
        prompts = _prompts(AnswerStore(run.answers_dir))
        plain = [greedy(target, prompt, NEW_TOKENS) for prompt in prompts]
        head = read_head(run.head_dir, shared_embeddings=target.embedding_table()).float()
        directory = run.head_dir.resolve()
    ground = Ground(folder, target, prompts, NEW_TOKENS, plain)
    spec = Spec(Layout(name), trained=True, k=K)
    job = make_job(name, directory, head, target, k=K, prompts=prompts, max_tokens=NEW_TOKENS)
    return Case(spec, ground, head, Acceptance(K), {}), job


def _prompts(store: AnswerStore) -> list[list[int]]:
    """Different ones that the head was not trained on, as many as vLLM reads at once."""
    rows = [row for row in store.rows() if row.set != "train"]
    different = dict.fromkeys(tuple(row.token_ids[: row.prompt_length]) for row in rows)
    prompts: list[list[int]] = []
    for prompt in different:
        if sum(map(len, prompts)) + len(prompt) <= AT_ONCE and len(prompts) < 6:
            prompts.append(list(prompt))
    return prompts


@pytest.fixture(params=sorted(FAMILIES))
def case(request: pytest.FixtureRequest, cases: dict[str, Case]) -> Case:
    return cases[request.param]


def test_every_draft_of_vllm_is_our_heads(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    assert case.result["target"] == str(case.ground.folder) and case.result["parallel_drafting"] is True
    compared = compare_drafts(case)
    counters = case.result["counters"]
    assert compared.drafts == counters["drafts"] > len(case.ground.prompts) >= 3
    assert compared.tokens == counters["draft_tokens"] == K * counters["drafts"]
    with capsys.disabled():
        print(f"\n{case.spec.name}: {compared.tokens} drafts compared, {compared.ties} near ties", end="")
    assert compared.ties <= compared.tokens // 100
    for output, plain in zip(case.result["outputs"], case.ground.plain, strict=True):
        at = first_difference(output, plain.token_ids)
        assert at is None or plain.gaps[at] < TIE


def test_the_head_and_its_twin_are_the_familys(cases: dict[str, Case]) -> None:
    """What could be lost on the road, and would not show in equal drafts if both sides lost it."""
    heads = {name: case.head.config for name, case in cases.items()}
    facts = {name: case.ground.target.facts for name, case in cases.items()}
    assert {name: fact.class_name for name, fact in facts.items()} == {
        "GptOss": "GptOssForCausalLM",
        "Qwen3Moe": "Qwen3MoeForCausalLM",
        "Gemma4": "Gemma4ForCausalLM",
        "Llama": "LlamaForCausalLM",
    }
    kinds = {name: head.rope.rope_type for name, head in heads.items()}
    assert kinds == {"GptOss": "yarn", "Qwen3Moe": "default", "Gemma4": "default", "Llama": "llama3"}
    assert heads["Gemma4"].rope.theta == 1e6 and not heads["Gemma4"].own_embeddings
    assert heads["Qwen3Moe"].drafter == "qwen3" and heads["Qwen3Moe"].reduced_vocabulary
    assert all(head.num_layers == 2 for head in heads.values())
    texts = {
        name: case.ground.target.tokenizer.decode(case.ground.prompts[0]) for name, case in cases.items()
    }
    assert "Reasoning: low" in texts["GptOss"] or "Reasoning: high" in texts["GptOss"]
    assert "Day: 2025-06-28" in texts["GptOss"] and "Day: 28 Jun 2025" in texts["Llama"]
    assert texts["Gemma4"].startswith("<bos><|turn>system\n<|think|>")
    for text in texts.values():
        assert "Be brief." in text or "Answer in one word." in text
