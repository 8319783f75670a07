"""Rules of vLLM that we compute too: its own answers, without an engine."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from peagle_train.export.contract import plain_config
from peagle_train.head.config import HeadConfig
from peagle_train.head.rope import Rope
from peagle_train.target.facts import KVLayer
from peagle_train.target.kv_groups import groups_of_head, one_group_works
from tests.head.test_rope import SCALINGS
from tests.head.toys import CONFIG
from tests.vllm.conftest import RESULTS, started

pytestmark = pytest.mark.vllm

SCRIPT = Path(__file__).with_name("vllm_rules.py")
POSITIONS = [0, 1, 5_000, 100_000]
ROPES = [
    (f"{drafter}, {name}", drafter, Rope.from_parameters(theta, {"rope_type": name, **scaling}))
    for drafter, theta in (("llama", 150_000.0), ("qwen3", 1e7))
    for name, scaling in SCALINGS.items()
]


def head(drafter: str, rope: Rope) -> HeadConfig:
    return replace(CONFIG, drafter=drafter, rope=rope, head_dim=64, max_position_embeddings=131_072)


def kv_questions() -> list[dict[str, Any]]:
    """Random models: runs of one or two kinds of layer, and heads of one or two kinds."""
    draw = random.Random(0)
    kinds = [(None, 8, 64), (128, 8, 64), (None, 2, 64), (1024, 4, 256), (None, 4, 512), (128, 2, 64)]
    questions = []
    for _ in range(400):
        target = draw.sample(kinds, draw.choice([1, 2, 2, 2]))
        layers = [kind for _ in range(draw.randint(1, 14)) for kind in target * draw.randint(1, 2)]
        kind = draw.sample([*target, *kinds], draw.choice([1, 1, 2]))
        head = [draw.choice(kind) for _ in range(draw.randint(1, 6))]
        questions.append({"target": layers, "head": head, "one": False})
    return questions


@pytest.fixture(scope="module")
def questions(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    room = tmp_path_factory.mktemp("ropes")
    asked = []
    for index, (_, drafter, rope) in enumerate(ROPES):
        folder = room / str(index)
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(plain_config(head(drafter, rope), "float32")))
        asked.append({"config": str(folder), "positions": POSITIONS})
    kv = kv_questions()
    return {"ropes": asked, "groups": kv + [{**question, "one": True} for question in kv]}


def layers_of(question: dict[str, Any]) -> tuple[list[KVLayer], list[KVLayer]]:
    target, drafter = ([KVLayer(*layer) for layer in question[part]] for part in ("target", "head"))
    return target, drafter


@pytest.fixture(scope="module")
def answers(
    vllm_python: Path, questions: dict[str, Any], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Any]:
    room = tmp_path_factory.mktemp("rules")
    with started(vllm_python, SCRIPT, room) as process:
        process.communicate(json.dumps(questions).encode())
    assert process.returncode == 0, (room / "vllm.log").read_text()[-4000:]
    found: dict[str, Any] = json.loads((room / RESULTS).read_text())
    return found


@pytest.mark.parametrize("index", range(len(ROPES)), ids=[name for name, _, _ in ROPES])
def test_rope_tables_are_the_servers(answers: dict[str, Any], index: int) -> None:
    """cos and sin at 0, 1, 5,000 and 100,000, read from the config.json that we export."""
    _, drafter, rope = ROPES[index]
    ours = rope.angles(torch.tensor(POSITIONS), head(drafter, rope).head_dim)
    for mine, theirs in zip(ours, answers["ropes"][index], strict=True):
        assert (mine - torch.tensor(theirs)).abs().max() < 1e-4


def test_kv_groups_are_the_servers(answers: dict[str, Any], questions: dict[str, Any]) -> None:
    seen = set()
    for question, theirs in zip(questions["groups"], answers["groups"], strict=True):
        target, drafter = layers_of(question)
        if question["one"]:
            assert (theirs == 1) == one_group_works([*target, *drafter]), question
        else:
            assert groups_of_head(target, drafter) == theirs, question
            seen.add(theirs)
    assert len(seen) > 2
