"""Several processes of one training, as a launcher would start them: forks of the tests' own process.

A new process spends seconds on imports; a fork has them, and gets the environment that torchrun and
`accelerate launch` would give it.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from accelerate.state import AcceleratorState, GradientState, PartialState

from peagle_train.files import write_json

WORLD = 2
TORCH_WAYS, ZERO_WAYS = ("ddp", "fsdp2"), ("zero1", "zero2", "zero3")


def start_ranks(said: Path, work: Callable[[], None]) -> list[int]:
    """Starts WORLD processes that can meet; returns their ids. What they print goes to `said`/rank-R.txt."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(WORLD)}
    return [
        _fork(said / f"rank-{rank}.txt", {**meeting, "RANK": str(rank), "LOCAL_RANK": str(rank)}, work)
        for rank in range(WORLD)
    ]


def ends_of(said: Path, pids: list[int], seconds: float = 120) -> tuple[list[int], str]:
    """Exit codes, and the last of what was printed. Who is still there after that time is killed."""
    ends = [end_within(pid, seconds) for pid in pids]
    return ends, "\n".join((said / f"rank-{rank}.txt").read_text()[-3000:] for rank in range(WORLD))


def end_within(pid: int, seconds: float) -> int:
    """The exit code of a process, negative for the signal that ended it; it is killed when the time is up."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        ended, status = os.waitpid(pid, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _fork(said: Path, environment: dict[str, str], work: Callable[[], None]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 1
    try:
        os.environ |= environment
        for state in (AcceleratorState, PartialState, GradientState):
            state._reset_state()  # of tests before, in the same process
        with said.open("w") as file:
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        work()
        code = 0
    except BaseException:  # noqa: BLE001 - nothing may go on with the tests of the parent
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


@contextmanager
def asked_for(way: str, room: Path) -> Iterator[None]:
    """The environment as a launcher leaves it for a way: one of TORCH_WAYS and ZERO_WAYS."""
    before = dict(os.environ)
    if way.startswith("zero"):
        config = room / f"{way}.json"
        # Without persistent parameters: toys are so small that none would ever be split.
        zero = {"stage": int(way[-1]), "stage3_param_persistence_threshold": 0}
        # At once: another process may be reading what it has written there itself.
        write_json(config, {"zero_optimization": zero, "train_micro_batch_size_per_gpu": "auto"})
        os.environ |= {
            "ACCELERATE_USE_DEEPSPEED": "true",
            "ACCELERATE_DEEPSPEED_CONFIG_FILE": str(config),
            "ACCELERATE_CONFIG_DS_FIELDS": "deepspeed_config_file",
        }
    elif way == "fsdp2":
        os.environ |= {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2"}
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)
