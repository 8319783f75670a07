"""Where a foreign head lies, and which target it shall draft for."""

from __future__ import annotations

from pathlib import Path

from peagle_train.errors import PeagleError
from peagle_train.export.contract import CONFIG_FILE
from peagle_train.export.faults import what_stands_at
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
    there, local = what_stands_at(path), path.exists() or path.is_symlink()
    if local or path.is_absolute() or source.startswith((".", "~")) or source.count("/") != 1:
        cure = "check the path"
        if path.name == CONFIG_FILE or path.suffix == ".safetensors":
            cure = (
                f"give its folder: {path.parent}" if path.is_file() else "check the path, and give its folder"
            )
        raise PeagleError(
            f"{source}: found {there}; expected the folder of a head, with {CONFIG_FILE} and safetensors, "
            f"or a Hub id owner/name; {cure}"
        )
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    try:
        return Path(snapshot_download(source, revision=revision, allow_patterns=_WANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise PeagleError(
            f"{source}: found {there} here, and it cannot be read as a Hub id. Check the name, "
            f"the network, and for gated heads `hf auth login`. The Hub library says: {error}"
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
