"""Training that goes on from a head: `head.start_from` names its directory.

The directory is one of ours (`peagle export` or `peagle import` wrote it). Its head must be the one the
recipe describes, to the last option: a recipe that says otherwise would describe another head than the one
that is trained. The draft vocabulary is the head's own: chosen anew, it would renumber the rows of `lm_head`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor

from peagle_train.errors import RecipeError
from peagle_train.export.contract import CONFIG_FILE, WEIGHTS_FILE
from peagle_train.export.layout import read_head
from peagle_train.files import sha256_of
from peagle_train.head.config import HeadConfig
from peagle_train.head.io import recorded_config
from peagle_train.head.model import DrafterHead
from peagle_train.recipe.head import differences
from peagle_train.recipe.schema import HeadSection


def start_parts(section: HeadSection) -> dict[str, Any]:
    """What the output of training depends on beside the recipe: the head's content, not only its path."""
    if section.start_from is None:
        return {}
    directory = Path(section.start_from)
    recorded_config(directory)
    return {"start_from": {name: sha256_of(directory / name) for name in (CONFIG_FILE, WEIGHTS_FILE)}}


def refuse_another(wanted: HeadConfig, head: HeadConfig, directory: Path) -> None:
    """Raises RecipeError with everything in which the head is another than the recipe's."""
    found = [f"{key}: {message}" for key, message in differences(head, wanted, directory)]
    if found:
        raise RecipeError(f"head.start_from: {directory}", found)


def read_start(directory: Path, embeddings: Tensor) -> DrafterHead:
    """The head to go on from, in float32; it is proven first.

    Args:
        embeddings: [V, H] the target's table, for a head that shares it.
    """
    recorded_config(directory)
    return read_head(directory, shared_embeddings=embeddings.cpu()).float()
