"""A head in a folder: `head.safetensors` and `head.json`, as checkpoints keep it.

vLLM's layout is another matter: `peagle_train.export`.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from peagle_train.errors import CorruptError, PeagleError
from peagle_train.files import read_json, sha256_of, write_json
from peagle_train.head.config import HeadConfig
from peagle_train.head.model import DrafterHead
from peagle_train.tensors import load_tensors, save_tensors

WEIGHTS, DESCRIPTION = "head.safetensors", "head.json"
RECORD_FILE = "export.json"
"""Beside every head we exported or imported: its config, its target, where it came from."""


def save_head(directory: Path, head: DrafterHead, tensors: Mapping[str, Tensor] | None = None) -> None:
    """Writes the head into an existing folder. Shared embeddings travel too: a folder stands alone.

    tensors: the whole weights by name, where the head's own are shards of them.
    """
    whole = head.state_dict() if tensors is None else tensors
    save_tensors(directory / WEIGHTS, {name: t.detach().cpu().contiguous() for name, t in whole.items()})
    write_json(
        directory / DESCRIPTION,
        {"config": head.config.to_dict(), "sha256": sha256_of(directory / WEIGHTS)},
    )


def load_head(directory: Path, dtype: torch.dtype | None = None) -> DrafterHead:
    """Reads a head that `save_head` wrote, proven as by `proven_config`."""
    head = DrafterHead(proven_config(directory))
    head.load_state_dict(load_tensors(directory / WEIGHTS))
    return head if dtype is None else head.to(dtype)


def proven_config(directory: Path) -> HeadConfig:
    """The config of a head that `save_head` wrote; its weights are compared with their checksum.

    Raises:
        CorruptError: the folder is incomplete or its weights differ from the checksum.
    """
    weights, description = directory / WEIGHTS, directory / DESCRIPTION
    for file in (weights, description):
        if not file.is_file():
            raise CorruptError(f"{directory}: no {file.name}; expected a checkpoint of `peagle train`")
    record = read_json(description)
    if sha256_of(weights) != record["sha256"]:
        raise CorruptError(f"{weights}: differs from its checksum; move {directory} away and train again")
    return HeadConfig.from_dict(record["config"])


def recorded_config(directory: Path) -> HeadConfig:
    """The config that export.json records; of a head that we did not write there is none."""
    path = directory / RECORD_FILE
    if not path.is_file():
        raise PeagleError(
            f"{directory}: found no {RECORD_FILE}; expected a head that `peagle export` or "
            f"`peagle import` wrote; for a head of another maker: peagle import {directory} --target RECIPE "
            "--out DIR"
        )
    try:
        return HeadConfig.from_dict(read_json(path)["head"])
    except (KeyError, TypeError, ValueError) as error:
        raise PeagleError(
            f"{path}: found no config of a head ({error}); expected the record of "
            "`peagle export`; export or import the head again"
        ) from error
