"""Many processes train what one does, however the head is wrapped; other launches than asked are refused.

Two processes meet over gloo. All ways of wrapping run in two launches, one with DeepSpeed and one without:
see distributed_worker.py.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from accelerate import DistributedType
from safetensors.torch import load_file

from peagle_train.errors import PeagleError
from peagle_train.head import matmul
from peagle_train.training.launch import Asked, asked, prove_processes, prove_wrapping
from peagle_train.training.zero import _settle
from tests.training import distributed_worker as worker
from tests.training.ranks import TORCH_WAYS, WORLD, ZERO_WAYS, ends_of, start_ranks

ROOT = Path(__file__).parents[2]


def launch(out: Path, *ways: str) -> Path:
    ends, said = ends_of(out, start_ranks(out, lambda: worker.main(out, *ways)))
    assert ends == [0] * WORLD, said
    return out


@pytest.fixture(scope="module", autouse=True)
def products_by_onednn() -> Iterator[None]:
    """The rows here are too few for it otherwise; test_resume.py has the same ways with torch's products."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(matmul, "LEAST_OPERATIONS", 0)
        yield


@pytest.fixture(scope="module")
def torch_ways(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return launch(tmp_path_factory.mktemp("torch"), *TORCH_WAYS)


@pytest.fixture(scope="module")
def zero_ways(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("deepspeed", reason="pip install 'peagle-train[cluster]'")
    return launch(tmp_path_factory.mktemp("zero"), *ZERO_WAYS, "demoted")


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], dict[str, torch.Tensor]]:
    """Results and final weights of one process at the same global batch."""
    directory = tmp_path_factory.mktemp("alone")
    loop = worker.make_loop(directory, worker.fresh_accelerator())
    assert loop.wrapped.found == ("one", 1)
    return worker.results(loop, directory), loop.wrapped.head_tensors()


def outcome(request: pytest.FixtureRequest, way: str, rank: int = 0) -> tuple[dict[str, Any], Path]:
    out: Path = request.getfixturevalue("torch_ways" if way in TORCH_WAYS else "zero_ways")
    return json.loads((out / f"{way}-{rank}.json").read_text()), out / f"{way}-{rank}.safetensors"


ways = pytest.mark.parametrize("way", [*TORCH_WAYS, *ZERO_WAYS])


@pytest.mark.processes
@ways
def test_two_processes_train_what_one_does(way: str, request: pytest.FixtureRequest, alone: Any) -> None:
    """Losses, gradient norms, counts and weights, with unequal rows and a process that has nothing to do."""
    single, weights = alone
    for rank in range(WORLD):
        found, file = outcome(request, way, rank)
        assert found["found"] == [way, WORLD]
        for mine, theirs in zip(found["records"], single["records"], strict=True):
            assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-5)
            assert mine["gradient_norm"] == pytest.approx(theirs["gradient_norm"], rel=1e-3)
            assert mine["accuracy"] == theirs["accuracy"]
            for count in ("elements", "tokens", "epoch", "learning_rate"):
                assert mine[count] == theirs[count]
        final = load_file(file)
        assert final.keys() == weights.keys()
        for name, tensor in weights.items():
            assert torch.allclose(tensor, final[name], rtol=1e-5, atol=1e-5), name


@pytest.mark.processes
@ways
def test_validation_is_a_sum_over_processes(way: str, request: pytest.FixtureRequest, alone: Any) -> None:
    """Not a mean of means: processes validate unequal rows; ZeRO-3 and FSDP2 gather weights for it."""
    found, _ = outcome(request, way)
    assert found["validation"] == alone[0]["validation"]
    assert found["validation"][0]["validation"]["num_drafts"] > 50


@pytest.mark.processes
@ways
def test_a_run_goes_on_bit_for_bit_from_what_it_saved(way: str, request: pytest.FixtureRequest) -> None:
    """And a step that was skipped, not taken, changed nothing in it."""
    saved = 0
    for rank in range(WORLD):
        found, _ = outcome(request, way, rank)
        assert found["resumed"], rank
        saved += found["saved"]
    parameters = sum(p.numel() for p in worker.toy_head(own_embeddings=False).parameters() if p.requires_grad)
    # DDP: two moments, once. The others: each process its part, ZeRO with master weights and padding.
    assert saved == pytest.approx((3 if way in ZERO_WAYS else 2) * parameters, rel=0.02)


@pytest.mark.processes
@pytest.mark.parametrize("way", ["zero3", "fsdp2"])
def test_parameters_are_gathered_once(way: str, request: pytest.FixtureRequest) -> None:
    """FSDP2 once a step; ZeRO-3 once a micro-batch, and once more in the first, which it watches."""
    counts = [round(count, 1) for count in outcome(request, way)[0]["gathers"]]
    # The steps of the toy rows: two micro-batches a process, one, two.
    assert counts == ([2, 1, 1, 1, 1] if way == "zero3" else [1, 0, 1, 1, 0])


def test_a_process_has_nothing_to_do_in_a_step_of_the_tests_above(tmp_path: Path) -> None:
    loop = worker.make_loop(tmp_path, worker.fresh_accelerator())
    stream = worker.Stream(
        loop.data.stream.rows,
        list(loop.data.stream.lengths.values()),
        0,
        batch_tokens=loop.section.batch_tokens,
        accumulate=worker.MICRO_BATCHES // WORLD,
        world=WORLD,
    )
    shares = [[stream.step(step, rank) for rank in range(WORLD)] for step in range(worker.STEPS)]
    assert [[]] in [mine for step in shares for mine in step]
    slots = [[sum(stream.lengths[d.row] for b in mine for d in b) for mine in step] for step in shares]
    assert all(first != second for first, second in slots)


def test_deepspeed_that_became_ddp_is_refused(zero_ways: Path) -> None:
    assert "asks for DeepSpeed, but accelerate made it MULTI_CPU" in (zero_ways / "demoted.txt").read_text()
    assert "ACCELERATE_USE_CPU=true" in (zero_ways / "demoted.txt").read_text()


@pytest.mark.slow  # two new processes with their imports; what they do is tested below, part by part
def test_accelerate_launch_on_a_cpu_is_refused_for_it_starts_one_process() -> None:
    launcher = [sys.executable, "-m", "accelerate.commands.launch", "--cpu", "--num_processes", "2"]
    script = "from tests.training.distributed_worker import fresh_accelerator; fresh_accelerator()"
    done = subprocess.run(
        [*launcher, "--num_machines", "1", "--no_python", sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode != 0
    assert "asked for 2 processes, but accelerate joined 1" in done.stderr, done.stderr[-2000:]


ACCELERATE = ["python", "-m", "accelerate.commands.launch"]


@pytest.mark.parametrize(
    ("environment", "parent", "expected"),
    [
        ({}, ["bash"], Asked("plain", 1)),
        ({}, ["git", "launch", "--num_processes", "2"], Asked("plain", 1)),
        ({"WORLD_SIZE": "8"}, [], Asked("plain", 8)),
        ({}, ["accelerate", "launch", "--cpu", "--num_processes", "2", "x.py"], Asked("plain", 2)),
        ({}, ["python", "/bin/accelerate", "launch", "--num-processes=4", "x.py"], Asked("plain", 4)),
        ({}, [*ACCELERATE, "--num_processes", "3", "-m", "peagle_train.training"], Asked("plain", 3)),
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_DEEPSPEED": "true"}, [], Asked("deepspeed", 2)),
        ({"WORLD_SIZE": "2", "ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}, [], Asked("fsdp2", 2)),
    ],
)
def test_what_was_asked_is_read_from_the_launcher(
    environment: dict[str, str], parent: list[str], expected: Asked
) -> None:
    assert asked(environment, parent) == expected


def test_processes_of_a_configuration_file_are_read(tmp_path: Path) -> None:
    file = tmp_path / "two.yaml"
    file.write_text("num_processes: 2\nuse_cpu: true\n")
    assert asked({}, ["accelerate", "launch", "--config_file", str(file), "x.py"]) == Asked("plain", 2)


@pytest.mark.parametrize("name", ["ACCELERATE_USE_MEGATRON_LM", "ACCELERATE_USE_FSDP"])
def test_what_no_head_needs_is_refused(name: str) -> None:
    with pytest.raises(PeagleError, match=r"expected .*FSDP"):
        asked({name: "true", "WORLD_SIZE": "2"}, [])


def accelerator(processes: int, kind: str = "MULTI_GPU", stage: int = 2) -> Any:
    plugin = SimpleNamespace(deepspeed_config={"zero_optimization": {"stage": stage}})
    state = SimpleNamespace(deepspeed_plugin=plugin)
    return SimpleNamespace(num_processes=processes, distributed_type=DistributedType(kind), state=state)


@pytest.mark.parametrize(
    ("wanted", "given", "said"),
    [
        (Asked("plain", 2), accelerator(1, "NO"), "asked for 2 processes, but accelerate joined 1"),
        (Asked("deepspeed", 2), accelerator(2), "asks for DeepSpeed, but accelerate made it MULTI_GPU"),
        (Asked("plain", 2), accelerator(2, "DEEPSPEED"), "did not ask for it"),
    ],
)
def test_processes_that_are_not_what_was_asked(wanted: Asked, given: Any, said: str) -> None:
    with pytest.raises(PeagleError, match=said):
        prove_processes(wanted, given)


@pytest.mark.parametrize(
    ("wanted", "found"),
    [
        (Asked("plain", 2), ("one", 1)),
        (Asked("plain", 2), ("ddp", 1)),
        (Asked("deepspeed", 2), ("ddp", 2)),
        (Asked("deepspeed", 2), ("zero1", 2)),
        (Asked("deepspeed", 2), ("zero2", 1)),
        (Asked("fsdp2", 2), ("one", 1)),
        (Asked("fsdp2", 2), ("ddp", 2)),
    ],
)
def test_a_wrapping_that_is_not_what_was_asked(wanted: Asked, found: tuple[str, int]) -> None:
    wrapped: Any = SimpleNamespace(found=found)
    with pytest.raises(PeagleError, match=rf"over 2 processes, but the head was wrapped as {found[0]} over"):
        prove_wrapping(wanted, accelerator(2), wrapped)


def test_a_wrapping_that_is_what_was_asked() -> None:
    for wanted, found in [
        (Asked("plain", 1), ("one", 1)),
        (Asked("plain", 1), ("ddp", 1)),  # torchrun with one process
        (Asked("plain", 2), ("ddp", 2)),
        (Asked("deepspeed", 2), ("zero2", 2)),
        (Asked("fsdp2", 2), ("fsdp2", 2)),
    ]:
        wrapped: Any = SimpleNamespace(found=found)
        prove_wrapping(wanted, accelerator(2), wrapped)


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"zero_optimization": {"stage": 2}, "optimizer": {}}, "section 'optimizer'"),
        ({"zero_optimization": {"stage": 2}, "scheduler": {}}, "section 'scheduler'"),
        ({"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}, "offload_param"),
        ({"zero_optimization": {"stage": 0}}, "ZeRO stage 0"),
    ],
)
def test_deepspeed_settings_that_cannot_be_honoured(config: dict[str, Any], said: str) -> None:
    section = worker.TrainSection(steps=1)
    with pytest.raises(PeagleError, match=said):
        _settle(config, section)


def test_deepspeed_leaves_accumulation_and_clipping_to_the_recipe() -> None:
    config: dict[str, Any] = {
        "zero_optimization": {"stage": 2},
        "gradient_accumulation_steps": 8,
        "gradient_clipping": 1.0,
        "bf16": {"enabled": True},
    }
    _settle(config, worker.TrainSection(steps=1, clip_norm=0.25))
    assert config["gradient_accumulation_steps"] == 1 and config["gradient_clipping"] == 0.25
    assert config["bf16"] == {"enabled": False}
