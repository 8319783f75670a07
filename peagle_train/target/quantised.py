"""Targets whose weights take fewer bits: MXFP4 (gpt-oss) and FP8 in blocks, as transformers loads them.

transformers keeps such weights as they are where kernels run them, and widens them elsewhere, with no more
than a line in a log: gpt-oss-120b then takes 234 GB in place of 65. It asks for kernels of any GPU it sees,
though the target be loaded on the CPU, where these do not run. So the choice is made here, before anything
is loaded:

    where it goes    kernels for it    its weights
    a CPU            -                 widened to target.dtype: the same numbers, as many as there are
    a GPU            there             as they are
    a GPU            missing           widened if the memory holds them, else refused
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from peagle_train.errors import PeagleError

if TYPE_CHECKING:
    import torch  # where it is needed it is there; what is known without weights is told without it

_CAPABILITY = {"mxfp4": (7, 5), "fp8": (8, 9)}
_TRITON = "3.4.0"
_SHARE = 0.9
"""Of the free memory; the rest is for the pass itself."""


def quantisation_of(config: Any, model: str) -> str | None:
    """mxfp4, fp8 or None. Raises PeagleError for any other, whose states nobody has compared."""
    found = _section(config)
    if found is None:
        return None
    method = str(found.get("quant_method", "unnamed"))
    if method not in _CAPABILITY:
        raise PeagleError(
            f"target {model}: its weights are quantised by {method}; expected "
            f"{' or '.join(_CAPABILITY)}, or none. Take the release in bfloat16, or one of these: a head "
            "drafts for either, its states differ little."
        )
    return method


def settle(
    config: Any, folder: Path, model: str, *, dtype: torch.dtype, device: torch.device, spread: bool
) -> str | None:
    """Decides by the table above, and writes into `config` what transformers is to do.

    Args:
        config: of transformers; changed where the weights are widened.
        folder: with the safetensors.
        device: where the target goes; with `spread` over all devices of that kind.

    Returns the quantisation that is kept; None for plain numbers, or widened ones.
    Raises PeagleError: an unknown quantisation, or weights that a GPU's free memory does not hold.
    """
    method = quantisation_of(config, model)
    missing = _missing(method, device) if method is not None and device.type == "cuda" else ""
    kept = method if device.type == "cuda" and not missing else None
    if method is not None and kept is None:
        section = _section(config)
        assert section is not None
        section["dequantize"] = True
    if device.type == "cuda":
        size = _stored(folder) if kept else _widened(config, dtype)
        _require_memory(size, free_memory(device, spread), model, method, missing, spread)
    return kept


@contextmanager
def kernels_told(model: str, kept: str | None) -> Iterator[None]:
    """What goes wrong with kernels, which come from the Hub as they are needed, is told once, as PeagleError.

    kept: as `settle` found; None: nothing needs kernels, and errors pass through.
    """
    try:
        yield
    except (ImportError, OSError, RuntimeError, ValueError) as error:
        if kept is None:
            raise
        raise PeagleError(
            f"target {model}: its {kept} weights cannot be run here ({error}). transformers takes its "
            "kernels from the Hub (kernels-community): load the target once where the Hub can be reached, or "
            "uninstall the package kernels to have the weights widened."
        ) from error


def free_memory(device: torch.device, spread: bool) -> int:
    """Free bytes of a GPU; with `spread` of all of them."""
    import torch

    if not spread:
        return torch.cuda.mem_get_info(device)[0]
    return sum(torch.cuda.mem_get_info(number)[0] for number in range(torch.cuda.device_count()))


def _section(config: Any) -> dict[str, Any] | None:
    """The settings of a quantisation, in the config or in its text part."""
    for part in (config, config.get_text_config()):
        found: dict[str, Any] | None = getattr(part, "quantization_config", None)
        if found is not None:
            return found
    return None


def _missing(method: str, device: torch.device) -> str:
    """What the kernels of a quantisation lack on a GPU, in words; empty if nothing."""
    import torch
    from transformers.utils.import_utils import (
        KERNELS_MAX_VERSION,
        KERNELS_MIN_VERSION,
        is_kernels_available,
        is_triton_available,
    )

    capability, needed = torch.cuda.get_device_capability(device), _CAPABILITY[method]
    if capability < needed:
        return "a GPU of compute capability {}.{}, this one has {}.{}".format(*needed, *capability)
    lacking = []
    if not is_triton_available(_TRITON):
        lacking.append(f"'triton>={_TRITON}'")
    if not is_kernels_available():
        lacking.append(f"'kernels>={KERNELS_MIN_VERSION},<{KERNELS_MAX_VERSION}'")
    return f"`pip install {' '.join(lacking)}`" if lacking else ""


def _stored(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _widened(config: Any, dtype: torch.dtype) -> int:
    """Bytes of all parameters in `dtype`, from a model without memory."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config)
    return int(sum(parameter.numel() for parameter in model.parameters()) * dtype.itemsize)


def _require_memory(size: int, free: int, model: str, method: str | None, missing: str, spread: bool) -> None:
    if size <= _SHARE * free:
        return
    cures = [f"keep them in {method}, which needs {missing}"] if missing else []
    if spread:
        owner, cures = "these GPUs have", [*cures, "take more or larger GPUs"]
    else:
        spreading = "deal its layers out to several GPUs with target.parallel: layers"
        owner, cures = "the GPU has", [*cures, spreading, "take a larger GPU"]
    widened = f" once widened from {method}" if missing else ""
    raise PeagleError(
        f"target {model}: its weights take {size / 1e9:,.1f} GB{widened}, and {owner} {free / 1e9:,.1f} GB "
        f"free, of which a tenth is left for the pass; {', or '.join(cures)}."
    )
