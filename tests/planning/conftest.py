"""No test here asks a hub, and the disk is as large as it has to be."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest


@pytest.fixture(autouse=True, scope="session")
def no_hub() -> Iterator[None]:
    """The Hub's library finds nothing, at once and without a retry."""
    from huggingface_hub import constants

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(constants, "HF_HUB_OFFLINE", True)
        yield


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the bytes that are free on every disk."""

    def free(size: float) -> None:
        monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=int(size)))

    return free
