"""The machine: what is installed, what it has room for, and what this recipe asks of it."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import torch
import yaml

from peagle_train.doctor.patient import Line, Patient, failure, ok, warning
from peagle_train.run import run_directory
from peagle_train.versions import versions

_LITTLE_DISK, _LITTLE_MEMORY = 5e9, 4e9  # bytes


def environment(patient: Patient) -> Iterator[Line]:
    """Versions, the build of torch, GPUs."""
    names = ("python", "torch", "transformers", "accelerate", "safetensors")
    known = versions()
    yield ok(", ".join(f"{name} {known[name]}" for name in names if name in known))
    build = torch.version.cuda or torch.version.hip
    wanted = patient.recipe.target.device
    if not torch.cuda.is_available():
        text = f"torch {torch.__version__} finds no GPU" + (f", though built for {build}" if build else "")
        if wanted == "cuda":
            yield failure(
                f"{text}; target.device is cuda",
                "run on a machine with a GPU, install the CUDA build (make install TORCH=cuda), or set "
                "target.device=cpu",
            )
        elif build or _has_gpu():
            yield warning(text, "check the driver (nvidia-smi), or install the CUDA build: TORCH=cuda")
        else:
            yield ok(f"{text}; {os.cpu_count()} cores")
        return
    gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    names_of = ", ".join(f"{gpu.name} {gpu.total_memory / 2**30:.0f} GiB" for gpu in gpus)
    yield ok(f"{len(gpus)} GPU: {names_of}; torch built for {build}")
    if patient.recipe.train.precision == "bf16" and not torch.cuda.is_bf16_supported():
        yield failure("train.precision bf16: this GPU has no bfloat16", "set train.precision=fp32")


def room(patient: Patient) -> Iterator[Line]:
    """Free disk below `output` and free memory; what the run will need is `peagle plan`'s to say."""
    directory = run_directory(patient.recipe)
    standing = directory.absolute()
    while not standing.exists():
        standing = standing.parent
    if not os.access(standing, os.W_OK):
        yield failure(f"{standing}: cannot be written to", "mend its permissions, or set `output`")
    free = shutil.disk_usage(standing).free
    text = f"{free / 1e9:,.1f} GB free for {directory}"
    cure = "hidden states alone may take more: see `peagle plan`, or set `output` to a larger disk"
    yield ok(text) if free > _LITTLE_DISK else warning(text, cure)
    memory = psutil.virtual_memory().available
    text = f"{memory / 2**30:,.1f} GiB of memory available"
    yield (
        ok(text) if memory > _LITTLE_MEMORY else warning(text, "end other programs, or take a larger machine")
    )


def packages(patient: Patient) -> Iterator[Line]:
    """What the recipe needs beyond the plain installation: kernels, launcher, trackers, a vLLM."""
    recipe = patient.recipe
    needed = []
    if recipe.train.backend == "flash":
        needed.append(
            ("flash_attn", "train.backend flash", "pip install flash-attn, or set train.backend=auto")
        )
    urls = [recipe.states.url, recipe.push.to]
    if any(url is not None and url.startswith("s3://") for url in urls):
        needed.append(("s3fs", "an s3:// URL", "pip install 's3fs[boto3]>=2026.1'"))
    if recipe.train.launch is not None:
        yield from _launcher(Path(recipe.train.launch))
        if _is_deepspeed(Path(recipe.train.launch)):
            cure = "pip install 'peagle-train[cluster]', or choose another launch file"
            needed.append(("deepspeed", recipe.train.launch, cure))
    for name, why, cure in needed:
        if importlib.util.find_spec(name) is None:
            yield failure(f"{name} is not installed; {why} needs it", cure)
        else:
            yield ok(f"{name} is installed, for {why}")
    if recipe.track.log_with:
        from peagle_train.training.tracking import require_trackers

        require_trackers(recipe.track)
        yield ok(f"trackers: {', '.join(recipe.track.log_with)}")
    if recipe.states.backend == "vllm" or "VLLM_PYTHON" in os.environ:
        yield _vllm()
    elif not needed and not recipe.track.log_with and recipe.train.launch is None:
        yield ok("the recipe needs none beyond the plain installation")


def _launcher(file: Path) -> Iterator[Line]:
    if not file.is_file():
        yield failure(
            f"train.launch: {file} is no file", "name one of recipes/accelerate, or leave train.launch out"
        )


def _is_deepspeed(file: Path) -> bool:
    if not file.is_file():
        return False
    settings = yaml.safe_load(file.read_text(encoding="utf-8"))
    return isinstance(settings, dict) and settings.get("distributed_type") == "DEEPSPEED"


def _vllm() -> Line:
    named = os.environ.get("VLLM_PYTHON")
    if named is None:
        return failure(
            "states.backend is vllm, but VLLM_PYTHON names no interpreter",
            "export VLLM_PYTHON=/path/to/python of the environment that has vLLM, or set states.backend=hf",
        )
    question = "import importlib.util, sys; sys.exit(importlib.util.find_spec('vllm') is None)"
    try:
        found = subprocess.run([named, "-c", question], capture_output=True, timeout=60).returncode == 0
    except (OSError, subprocess.TimeoutExpired) as error:
        return failure(f"VLLM_PYTHON: {named} does not run ({error})", "name a Python interpreter")
    if not found:
        return failure(f"VLLM_PYTHON: {named} has no vLLM", "install vLLM there, or name another interpreter")
    return ok(f"vLLM's interpreter: {named}")


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None
