"""Rows of states that need no target, for tests of the store."""

from __future__ import annotations

from pathlib import Path

import torch

from peagle_train.store import StateRow, StateWriter

AUX, HIDDEN = (1, 3), 4


def row(index: int, n: int = 6, set: str = "train", spans: list[list[int]] | None = None) -> StateRow:
    """A row as a target makes it, generated from token 2 on unless `spans` say otherwise."""
    generator = torch.Generator().manual_seed(index)
    mask = torch.zeros(n, dtype=torch.bool)
    for start, end in spans or [[2, n]]:
        mask[start:end] = True
    return StateRow(
        index,
        set,
        f"toy:{index}",
        torch.arange(n),
        mask,
        torch.randn(n - 1, len(AUX) * HIDDEN, generator=generator),
        torch.randn(n - 1, HIDDEN, generator=generator),
        2,
    )


def writer(
    folder: Path, fingerprint: str = "f1", dtype: str = "float32", url: str | None = None
) -> StateWriter:
    return StateWriter(folder, fingerprint, AUX, HIDDEN, dtype, url)


def filled(folder: Path, batches: int = 3, url: str | None = None) -> StateWriter:
    """A sealed store of batches of two rows each: batch 0 has the rows 0 and 1."""
    build = writer(folder, url=url)
    for batch in range(batches):
        build.write_batch(batch, [row(2 * batch, 9), row(2 * batch + 1, 7)])
    build.seal()
    return build


def harm(path: Path, at: int = -3) -> None:
    """Changes one byte of a file."""
    content = bytearray(path.read_bytes())
    content[at] ^= 1
    path.write_bytes(content)
