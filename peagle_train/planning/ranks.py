"""Memory of one process under every launch file: the engine's own plan, before there is anything to measure.

What a training measures when it begins, `resident`, is estimated here: on a GPU the head's weights and the
target's output layer, on a CPU the libraries too, whose size is this process's own.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import yaml

from peagle_train.errors import PeagleError
from peagle_train.head.sampling import kept_shares
from peagle_train.planning.head import HeadPlan
from peagle_train.recipe.schema import Recipe
from peagle_train.training.memory import (
    GIB,
    SHARE,
    MemoryPlan,
    device_budget,
    plan_memory,
    resident_bytes,
    states_bytes,
)

GPU_GB = 80.0
"""Memory of the GPUs that the launch files are written for (H100, A100), in GB."""

FOLDER = Path("recipes/accelerate")
CPU = torch.device("cpu")


@dataclass(frozen=True)
class Launch:
    """What a launch file starts. kind: one, ddp, zero1, zero2, zero3 or fsdp2; file: None for one process."""

    file: Path | None
    kind: str
    processes: int
    machines: int = 1

    @property
    def name(self) -> str:
        return "one process" if self.file is None else self.file.name


ALONE = Launch(None, "one", 1)


@dataclass(frozen=True)
class Rank:
    """One process of a launch. plan: None where the smallest cut does not fit; fault: then, why."""

    launch: Launch
    device: str
    budget: int
    plan: MemoryPlan | None
    fault: str | None


def read_launch(file: Path) -> Launch:
    """What a launch file of accelerate asks for.

    Raises PeagleError: there is no such file, or it asks for something that no head needs.
    """
    if not file.is_file():
        known = ", ".join(map(str, sorted(FOLDER.glob("*.yaml")))) or f"none in {FOLDER}"
        raise PeagleError(f"{file}: no such launch file; expected one of accelerate's, for example {known}")
    try:
        settings: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except yaml.YAMLError as error:
        raise PeagleError(f"{file}: not readable as YAML ({error})") from error
    if not isinstance(settings, dict):
        raise PeagleError(f"{file}: found no keys; expected a launch file of accelerate, see {FOLDER}")
    processes = int(settings.get("num_processes") or 1)
    kind = str(settings.get("distributed_type", "NO")).upper()
    names = {"NO": "one", "MULTI_GPU": "ddp", "MULTI_CPU": "ddp"}
    if kind == "DEEPSPEED":
        way = f"zero{(settings.get('deepspeed_config') or {}).get('zero_stage', 2)}"
    elif kind == "FSDP":
        way = "fsdp2"
    elif kind in names:
        way = names[kind] if processes > 1 else "one"
    else:
        raise PeagleError(
            f"{file}: distributed_type {kind}; expected NO, MULTI_GPU, DEEPSPEED or FSDP, see "
            "docs/launching.md"
        )
    return Launch(file, way, processes, int(settings.get("num_machines") or 1))


def launches(recipe: Recipe, chosen: Path | None) -> list[Launch]:
    """The chosen launch file alone; left out: all that stand in recipes/accelerate, and the recipe's own."""
    if chosen is not None:
        return [read_launch(chosen)]
    files = sorted(FOLDER.glob("*.yaml"))
    if recipe.train.launch is not None and not any(_same(file, recipe.train.launch) for file in files):
        files.append(Path(recipe.train.launch))
    return [read_launch(file) for file in files]


def launch_of(recipe: Recipe, chosen: Path | None) -> Launch:
    """How this recipe's training starts: as chosen, as the recipe says, or as one process."""
    if chosen is not None:
        return read_launch(chosen)
    return ALONE if recipe.train.launch is None else read_launch(Path(recipe.train.launch))


def on_gpus(recipe: Recipe, launch: Launch) -> bool:
    """Whether a launch is planned for GPUs: a launch file is, one process where there is a GPU."""
    if recipe.target.device == "cpu":
        return False
    return launch.file is not None or torch.cuda.is_available()


def gpu_bytes(asked: float | None) -> int:
    """Memory of a GPU: as asked in GB, that of the GPU here, or GPU_GB."""
    if asked is None and torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory
    return int((GPU_GB if asked is None else asked) * 1e9)


def rank_of(
    recipe: Recipe, head: HeadPlan, target_width: int, longest: int, launch: Launch, gpu: int
) -> Rank:
    """Memory of one process.

    Args:
        recipe: its `train` section.
        head: its head.
        target_width: hidden size of the target.
        longest: real slots of the largest micro-batch.
        launch: how it is started.
        gpu: bytes of a GPU.
    """
    train, cuda = recipe.train, on_gpus(recipe, launch)
    device = torch.device("cuda") if cuda else CPU
    # The frozen output layer of the target, in the target's dtype.
    output = head.head.config.draft_vocab_size * target_width * getattr(torch, recipe.target.dtype).itemsize
    resident = head.weights + output
    if not cuda:
        import peagle_train.training.stage  # noqa: F401 - so that this process holds what a training holds

        resident += resident_bytes(CPU)
    if train.memory is not None:
        budget = int(train.memory * GIB)
    elif cuda:
        budget = int(SHARE["cuda"] * gpu)
    else:
        budget = device_budget(CPU, 1) + head.weights + output
    try:
        plan = plan_memory(
            head.head,
            longest=longest,
            shares=kept_shares(train.positions, train.cod.rate, train.cod.floor),
            device=device,
            half=train.precision == "bf16",
            backend="sdpa" if train.backend == "auto" else train.backend,
            budget=budget,
            resident=resident,
            states=states_bytes(head.head, launch.kind, launch.processes),
        )
    except PeagleError as error:
        return Rank(launch, device.type, budget, None, str(error))
    return Rank(launch, device.type, budget, plan, None)


def _same(file: Path, named: str) -> bool:
    return file.resolve() == Path(named).resolve()
