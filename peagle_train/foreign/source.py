"""Where a foreign head lies, and which target it shall draft for."""

from __future__ import annotations

from pathlib import Path

from peagle_train.errors import PeagleError
from peagle_train.recipe import load_recipe
from peagle_train.recipe.load import find_recipe
from peagle_train.recipe.schema import Recipe, TargetSection

_WANTED = ["*.json", "*.safetensors"]


def head_folder(source: str, revision: str | None = None) -> Path:
    """The folder of a head: as it stands, or fetched from the Hub (JSON and safetensors only).

    Raises PeagleError where there is neither.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise PeagleError(f"{source}: found a file; expected the folder of a head, or a Hub id owner/name")
    if path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1:
        raise PeagleError(
            f"{source}: found no such folder; expected the folder of a head, or a Hub id owner/name"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=_WANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise PeagleError(
            f"{source}: cannot be read as a folder or a Hub id. Check the name, the network, and for gated "
            f"heads `hf auth login`. The Hub library says: {error}"
        ) from error


def target_of(text: str) -> tuple[TargetSection, Recipe | None]:
    """The target that `--target` names: a recipe's, a model's folder, a Hub id or `package:NAME`."""
    path = Path(text).expanduser()
    if path.is_dir() or text.startswith("package:"):
        return TargetSection(model=text), None
    named = Path("recipes") / f"{text}.yaml"
    if path.is_file() or path.suffix in (".yaml", ".yml") or named.is_file() or text.count("/") != 1:
        recipe = load_recipe(find_recipe(text))
        return recipe.target, recipe
    return TargetSection(model=text), None
