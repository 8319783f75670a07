"""Launch files say to accelerate what they should; the SLURM script saves, queues again, or gives up."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.commands.launch import _validate_launch_command, launch_command_parser
from accelerate.utils import FullyShardedDataParallelPlugin
from accelerate.utils.launch import (
    prepare_deepspeed_cmd_env,
    prepare_multi_gpu_env,
    prepare_simple_launcher_cmd_env,
)

from peagle_train.training.launch import Asked, asked

ROOT = Path(__file__).parents[2]
FILES = {
    "one_gpu": Asked("plain", 1),
    "eight_gpus": Asked("plain", 8),
    "two_nodes": Asked("plain", 16),
    "deepspeed_zero2": Asked("deepspeed", 8),
    "deepspeed_zero3": Asked("deepspeed", 8),
    "fsdp2": Asked("fsdp2", 8),
}


def environment_of(name: str) -> tuple[Any, dict[str, str]]:
    """accelerate's reading of a file, and the environment it gives to processes."""
    file = str(ROOT / "recipes" / "accelerate" / f"{name}.yaml")
    arguments = launch_command_parser().parse_args(
        ["--config_file", file, "--main_process_port", "0", "-m", "peagle_train.training", "RECIPE"]
    )
    arguments, defaults, _ = _validate_launch_command(arguments)
    if arguments.use_deepspeed:
        arguments.deepspeed_fields_from_accelerate_config = ",".join(defaults.deepspeed_config)
        return arguments, prepare_deepspeed_cmd_env(arguments)[1]
    if arguments.use_fsdp or arguments.multi_gpu:
        return arguments, prepare_multi_gpu_env(arguments)
    return arguments, prepare_simple_launcher_cmd_env(arguments)[1]


def test_every_file_is_here_and_in_the_docs() -> None:
    assert {p.stem for p in (ROOT / "recipes" / "accelerate").glob("*.yaml")} == set(FILES)
    page = (ROOT / "docs" / "launching.md").read_text()
    assert all(f"`{name}.yaml`" in page for name in FILES)


@pytest.mark.parametrize("name", FILES)
def test_accelerate_starts_what_the_file_is_named_for(name: str) -> None:
    wanted = FILES[name]
    config = load_config_from_file(str(ROOT / "recipes" / "accelerate" / f"{name}.yaml"))
    assert config.num_processes == wanted.processes and config.mixed_precision == "no"
    arguments, environment = environment_of(name)
    assert asked({**environment, "WORLD_SIZE": str(arguments.num_processes)}, []) == wanted


@pytest.mark.parametrize("stage", [2, 3])
def test_deepspeed_files_ask_for_their_stage_without_what_is_refused(stage: int) -> None:
    _, environment = environment_of(f"deepspeed_zero{stage}")
    assert environment["ACCELERATE_DEEPSPEED_ZERO_STAGE"] == str(stage)
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE"] == "none"
    assert environment["ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE"] == "none"
    assert environment["ACCELERATE_DEEPSPEED_ZERO3_INIT"] == "false"


def test_accelerate_takes_the_settings_of_fsdp2(monkeypatch: pytest.MonkeyPatch) -> None:
    for key, value in environment_of("fsdp2")[1].items():
        monkeypatch.setenv(key, value)
    plugin = FullyShardedDataParallelPlugin()
    assert plugin.fsdp_version == 2 and plugin.reshard_after_forward is False


SRUN = """#!/bin/bash
# Stands in for SLURM's: one node's task, in this process.
while [[ $1 == --* ]]; do shift; done
export SLURM_NODEID=1
exec "$@"
"""
SCONTROL = """#!/bin/bash
case $1 in
    show) printf 'node1\\nnode2\\n' ;;
    *) echo "$@" >>"$STUBS/scontrol.log" ;;
esac
"""
PYTHON = """#!/bin/bash
# Stands in for the training: tells how it was called, then saves on SIGTERM or ends with $ENDS.
echo "$@" >"$STUBS/call"
trap 'exit 143' TERM
touch "$STUBS/started"
[ "$ENDS" = wait ] || exit "$ENDS"
while :; do sleep 0.05; done
"""


def slurm(room: Path, ends: str, stop: bool) -> tuple[int, str]:
    """Runs the script over stand-ins; returns its exit code and what scontrol was told."""
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL), ("python", PYTHON)):
        (room / name).write_text(text)
        (room / name).chmod(0o755)
    environment = {
        **os.environ,
        "PATH": f"{room}:{os.environ['PATH']}",
        "STUBS": str(room),
        "ENDS": ends,
        "PYTHON": str(room / "python"),
        "SLURM_JOB_ID": "41234",
        "SLURM_JOB_NODELIST": "node[1-2]",
        "SLURM_NNODES": "2",
        "SLURM_GPUS_ON_NODE": "8",
    }
    script = subprocess.Popen(
        ["bash", str(ROOT / "scripts" / "train.slurm"), "mine.yaml", "train.steps=3"], env=environment
    )
    if stop:
        deadline = time.monotonic() + 20
        while not (room / "started").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        script.send_signal(signal.SIGTERM)
    code = script.wait(timeout=30)
    log = room / "scontrol.log"
    return code, log.read_text() if log.is_file() else ""


def test_slurm_starts_the_launcher_of_each_node(tmp_path: Path) -> None:
    assert slurm(tmp_path, "0", stop=False) == (0, "")
    call = (tmp_path / "call").read_text()
    for part in (
        "-m accelerate.commands.launch --config_file recipes/accelerate/two_nodes.yaml",
        "--num_machines 2 --num_processes 16 --machine_rank 1 --main_process_ip node1",
        "--main_process_port 21234 -m peagle_train.training mine.yaml train.steps=3",
    ):
        assert part in call


def test_slurm_near_the_limit_saves_and_queues_again(tmp_path: Path) -> None:
    assert slurm(tmp_path, "wait", stop=True) == (143, "requeue 41234\n")


def test_slurm_does_not_queue_a_failed_training_again(tmp_path: Path) -> None:
    assert slurm(tmp_path, "1", stop=False) == (1, "")
