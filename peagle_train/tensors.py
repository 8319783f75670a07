"""safetensors files whose faults are told like all others: which file, what is wrong, what to do."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from safetensors import SafetensorError, safe_open
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


def load_tensors(path: Path, names: Sequence[str] | None = None) -> dict[str, Tensor]:
    """Reads the tensors of `path`, all or those named. Raises CorruptError if it has none, or not those."""
    try:
        if names is None:
            return load_file(str(path))
        with safe_open(path, framework="pt") as file:
            return {name: file.get_tensor(name) for name in names}
    except (SafetensorError, OSError) as error:
        raise CorruptError(
            f"{path}: not readable as safetensors ({error}); move it away and run the command again"
        ) from error
