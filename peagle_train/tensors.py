"""safetensors files whose faults are told like all others: which file, what is wrong, what to do."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from peagle_train.errors import CorruptError, PeagleError


def save_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = None) -> None:
    """Writes tensors to `path`. Raises PeagleError if they cannot be written, on a full disk for example."""
    try:
        save_file(tensors, str(path), metadata=metadata)
    except (SafetensorError, OSError) as error:
        size = sum(t.numel() * t.element_size() for t in tensors.values())
        raise PeagleError(
            f"{path.parent}: could not write {size / 1e6:,.1f} MB of tensors ({error}); nothing that stood "
            "there was changed. Make room, or set `output` to another disk, and run the command again."
        ) from error


def load_tensors(path: Path) -> dict[str, Tensor]:
    """Reads all tensors of `path`. Raises CorruptError if it is no safetensors file."""
    try:
        return load_file(str(path))
    except (SafetensorError, OSError) as error:
        raise CorruptError(
            f"{path}: not readable as safetensors ({error}); move it away and run the command again"
        ) from error
