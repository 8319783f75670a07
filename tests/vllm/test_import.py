"""A published head and its import draft the same tokens in a real vLLM: nothing is lost in our words."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from peagle_train.foreign.bring import import_head
from peagle_train.head.rope import Rope
from peagle_train.target.adapter import Target
from peagle_train.twin import models as twins
from tests.foreign import publish
from tests.vllm.conftest import RUNNER, collect, make_job, started, submit
from tests.vllm.heads import make_head

pytestmark = pytest.mark.vllm

K = 4
_GENERATOR = torch.Generator().manual_seed(2)
PROMPTS = [torch.randint(5, 250, (n,), generator=_GENERATOR).tolist() for n in (5, 12, 20)]
SIZES = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 64, "intermediate_size": 80}
# How it was published: the writer, what the head is, and what vLLM is told beside its directory.
PUBLISHED: dict[str, dict[str, Any]] = {
    "amazon": {"write": publish.amazon, "layers": 4, "format": "plain"},
    "speculators": {"write": publish.speculators, "head": {"drafter": "qwen3"}, "format": "speculators"},
    "eagle3": {
        "write": publish.eagle3,
        "head": {"method": "eagle3", "mask_token_id": None, "rope": Rope(10_000.0)},
        "format": "plain",
    },
}


@pytest.fixture(scope="module")
def results(vllm_python: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """What vLLM drafts with each published head, and with its import."""
    room = tmp_path_factory.mktemp("imports")
    folder = twins.tiny_llama(room / "target", layers=8, hidden=128)  # vLLM's default aux layers: 2, 4, 5
    target = Target.load(folder, dtype="float32", device="cpu")
    jobs = []
    for seed, (name, how) in enumerate(PUBLISHED.items()):
        head = make_head(
            target,
            layers=how.get("layers", 1),
            aux_layers=(2, 4, 5),
            draft_vocab_size=160,
            own_embeddings=True,
            initialise="random",
            seed=seed,
            **{**SIZES, **how.get("head", {})},
        )
        theirs, ours = room / f"{name}-theirs", room / f"{name}-ours"
        how["write"](head, theirs, torch.float32)
        if how["format"] == "speculators":  # it names the target that it was made for
            _name_target(theirs, folder)
        aux = [2, 4, 5] if name == "eagle3" else None
        import_head(
            str(theirs), ours, target=str(folder), aux_layers=aux, console=Console(file=io.StringIO())
        )
        for owner, directory, format in (("theirs", theirs, how["format"]), ("ours", ours, "plain")):
            job = make_job(
                f"{name}-{owner}",
                directory,
                head,
                target,
                k=K,
                prompts=PROMPTS,
                max_tokens=16,
                format=format,
            )
            jobs.append(job)
    with started(vllm_python, RUNNER, room) as process:
        for job in jobs:
            submit(process, job)
        return collect(process, room)


def _name_target(directory: Path, folder: Path) -> None:
    config = json.loads((directory / "config.json").read_text())
    config["speculators_config"]["verifier"]["name_or_path"] = str(folder)
    config["speculators_config"]["proposal_methods"][0]["speculative_tokens"] = K
    (directory / "config.json").write_text(json.dumps(config))


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_import_drafts_what_the_published_head_drafts(
    results: dict[str, dict[str, Any]], name: str
) -> None:
    theirs, ours = results[f"{name}-theirs"], results[f"{name}-ours"]
    assert len(theirs["records"]) > 10
    assert ours["records"] == theirs["records"]
    assert ours["outputs"] == theirs["outputs"] and ours["counters"] == theirs["counters"]
