"""What the launcher was asked for, and proof that it was given.

Launchers demote silently: `accelerate launch --cpu --num_processes 2` starts one process, with
ACCELERATE_USE_CPU=true DeepSpeed becomes DDP, accelerate's FSDP2 on a CPU does not synchronise, and
processes that do not find each other train one head each. So what was asked is read from the launcher's
environment and command line, and compared with the processes that met and with what module and optimizer
became.
"""

from __future__ import annotations

import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import psutil
import torch
import yaml
from accelerate import Accelerator, DistributedDataParallelKwargs, DistributedType, InitProcessGroupKwargs
from accelerate.commands.config.config_args import default_config_file
from accelerate.commands.launch import launch_command_parser
from accelerate.utils import ProjectConfiguration
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from peagle_train.errors import PeagleError
from peagle_train.recipe.schema import TrainSection
from peagle_train.run import Run
from peagle_train.stages import TRACKING
from peagle_train.training.module import DraftTraining
from peagle_train.training.wrapped import Replicated, StepModule, Wrapped

Way = Literal["plain", "deepspeed", "fsdp2"]

ON_A_CPU = "`torchrun --standalone --nproc_per_node N -m peagle_train.training RECIPE`"
FILES = "recipes/accelerate/ has launch files, docs/launching.md tells which to choose"


@dataclass(frozen=True)
class Asked:
    """way: plain is one process or DDP. processes: how many of them the launcher was told to start."""

    way: Way
    processes: int


def asked(environment: Mapping[str, str] = os.environ, parent: Sequence[str] | None = None) -> Asked:
    """What the launcher was asked for.

    Args:
        environment: as the launcher left it.
        parent: command line of the parent process; None: it is looked up.

    Raises:
        PeagleError: FSDP1 or Megatron, which no head needs.
    """

    def on(name: str) -> bool:
        return environment.get(name, "").lower() in ("true", "1", "yes")

    if on("ACCELERATE_USE_MEGATRON_LM"):
        raise PeagleError(f"the launcher asks for Megatron-LM; expected DDP, DeepSpeed or FSDP2; {FILES}")
    way: Way = "plain"
    if on("ACCELERATE_USE_DEEPSPEED"):
        way = "deepspeed"
    elif on("ACCELERATE_USE_FSDP"):
        if environment.get("FSDP_VERSION") != "2":
            raise PeagleError(
                f"the launcher asks for FSDP {environment.get('FSDP_VERSION', '1')}; expected FSDP 2: set "
                "fsdp_version: 2 in its configuration, or take recipes/accelerate/fsdp2.yaml"
            )
        way = "fsdp2"
    if "WORLD_SIZE" in environment:
        return Asked(way, int(environment["WORLD_SIZE"]))
    return Asked(way, _told_on_the_command_line(_parent() if parent is None else parent))


def make_accelerator(run: Run) -> Accelerator:
    """accelerate as recipe and launcher want it. Raises PeagleError if the launcher gave something else."""
    wanted = asked()
    recipe = run.recipe
    cpu = recipe.target.device == "cpu" or not torch.accelerator.is_available()
    if wanted.way == "deepspeed":
        _ready_for_deepspeed(cpu)
    accelerator = Accelerator(
        # DeepSpeed on a CPU is asked for by its backend: with cpu=True accelerate makes it DDP.
        cpu=cpu and wanted.way != "deepspeed",
        # Autocast is ours, the same under every launcher: see StepModule.
        mixed_precision="no",
        log_with=[*recipe.track.log_with] or None,
        project_config=ProjectConfiguration(logging_dir=str(run.training_dir / TRACKING)),
        kwargs_handlers=[
            DistributedDataParallelKwargs(gradient_as_bucket_view=True),
            *([InitProcessGroupKwargs(backend="gloo")] if cpu and wanted.way == "deepspeed" else []),
        ],
    )
    prove_processes(wanted, accelerator)
    if wanted.way == "deepspeed":
        # Else transformers would split the target too, which is loaded whole for a moment and let go.
        unset_hf_deepspeed_config()
    return accelerator


def wrapping(accelerator: Accelerator) -> str:
    """What `Wrapped.found` will say: one, ddp, zero1, zero2, zero3 or fsdp2."""
    way = asked().way
    if way == "deepspeed":
        return f"zero{accelerator.state.deepspeed_plugin.zero_stage}"
    return way if way == "fsdp2" else "ddp" if accelerator.num_processes > 1 else "one"


def wrap(accelerator: Accelerator, module: DraftTraining, section: TrainSection) -> Wrapped:
    """Module and optimizer, wrapped as the launcher asked. Raises PeagleError if they came out otherwise."""
    wanted = asked()
    module.move_target_output(accelerator.device)
    step = StepModule(module, section.precision, accelerator.device)
    wrapped: Wrapped
    if wanted.way == "deepspeed":
        from peagle_train.training.zero import Partitioned

        wrapped = Partitioned(accelerator, step, section)
    elif wanted.way == "fsdp2":
        from peagle_train.training.sharded import Sharded

        wrapped = Sharded(accelerator, step, section)
    else:
        wrapped = Replicated(accelerator, step, section)
    prove_wrapping(wanted, accelerator, wrapped)
    return wrapped


def prove_processes(wanted: Asked, accelerator: Accelerator) -> None:
    """Raises PeagleError unless as many processes met as were asked for, in the way that was asked for."""
    if accelerator.num_processes != wanted.processes:
        raise PeagleError(
            f"the launcher was asked for {wanted.processes} processes, but accelerate joined "
            f"{accelerator.num_processes}: each would train a head of its own. On a CPU launch with "
            f"{ON_A_CPU}; `accelerate launch --cpu` starts one process whatever it is told. For GPUs, "
            f"{FILES}."
        )
    kind = accelerator.distributed_type
    if wanted.way == "deepspeed" and kind != DistributedType.DEEPSPEED:
        raise PeagleError(
            f"the launcher asks for DeepSpeed, but accelerate made it {kind.value}. ACCELERATE_USE_CPU=true "
            "and `use_cpu: true` do that: unset them; DeepSpeed runs on a CPU without"
        )
    if wanted.way != "deepspeed" and kind == DistributedType.DEEPSPEED:
        raise PeagleError(f"accelerate uses DeepSpeed, but the launcher did not ask for it; {FILES}")


def prove_wrapping(wanted: Asked, accelerator: Accelerator, wrapped: Wrapped) -> None:
    """Raises PeagleError unless module and optimizer are wrapped as asked, over all processes."""
    way = {"plain": "ddp" if wanted.processes > 1 else "one", "fsdp2": "fsdp2"}.get(wanted.way)
    if wanted.way == "deepspeed":
        way = f"zero{accelerator.state.deepspeed_plugin.deepspeed_config['zero_optimization']['stage']}"
    # torchrun with one process gives DDP over one.
    alone = way == "one" and wrapped.found == ("ddp", 1)
    if wrapped.found != (way, wanted.processes) and not alone:
        raise PeagleError(
            f"the launcher asks for {way} over {wanted.processes} processes, but the head was wrapped as "
            f"{wrapped.found[0]} over {wrapped.found[1]}: gradients would not be shared as asked. Check the "
            f"launcher's configuration; {FILES}."
        )


def _ready_for_deepspeed(cpu: bool) -> None:
    """Settles what DeepSpeed and accelerate take from elsewhere when the first Accelerator is made."""
    try:
        import deepspeed
    except ImportError as error:
        raise PeagleError(
            f"the launcher asks for DeepSpeed, but it cannot be imported ({error}); run "
            "`pip install 'peagle-train[cluster]'`, or choose another launch file"
        ) from error
    # DeepSpeed calls collectives by names that torch 2.13 warns about, at every call.
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\.distributed\.c10d_logger")
    if cpu:
        # Found usable, this one would be compiled for minutes at the first start; gloo does its work.
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False


def _parent() -> list[str]:
    parent = psutil.Process().parent()
    try:
        return parent.cmdline() if parent is not None else []
    except psutil.Error:
        return []


def _told_on_the_command_line(command: Sequence[str]) -> int:
    """Processes of an `accelerate launch` that set no WORLD_SIZE, read as accelerate reads them; else 1."""
    names = (
        "accelerate launch",
        "accelerate-launch",
        "accelerate.commands.launch",
        "accelerate/commands/launch.py",
    )
    # The name is one word or two, perhaps behind an interpreter: what follows it are the options.
    ends = [
        end
        for start in range(min(3, len(command)))
        for end in (start + 1, start + 2)
        if " ".join(command[start:end]).endswith(names)
    ]
    if not ends:
        return 1
    options, _ = launch_command_parser().parse_known_args(list(command[ends[0] :]))
    if options.num_processes is not None:
        return int(options.num_processes)
    file = Path(options.config_file or default_config_file)
    settings = yaml.safe_load(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return int(settings.get("num_processes") or 1)
