"""The head that a job left, proven to be read as its own program computes it."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

from peagle_train.errors import PeagleError
from peagle_train.foreign.read import read_foreign
from peagle_train.head.io import load_head
from peagle_train.head.model import DrafterHead
from peagle_train.head.session import DraftSession
from peagle_train.store.states import StateStore
from peagle_train.target.facts import TargetFacts
from peagle_train.tensors import load_tensors
from scripts.compare_peer.learn import Job

CLOSE = 2e-3
"""Logits of one head in two programs: both are float32, of the order of 10."""


def read_learned(job: Job, facts: TargetFacts, store: StateStore) -> DrafterHead:
    """The head that a job left.

    Raises:
        PeagleError: the peer's head does not give its own logits here.
    """
    directory = Path(job.directory)
    if job.side == "ours":
        return load_head(directory).eval()
    head = read_foreign(directory / "head", facts).head.eval()
    probe = load_tensors(directory / "probe.safetensors")
    gap = probe_gap(head, store, job.probe, probe, job.positions)
    if not gap < CLOSE:
        raise PeagleError(
            f"{directory}: logits differ by {gap:.4f} from those its own program gave; expected less than "
            f"{CLOSE}: the head was read wrongly, and its acceptance would mean nothing"
        )
    return head


def probe_gap(
    head: DrafterHead, store: StateStore, row: int, probe: dict[str, Tensor], positions: int
) -> float:
    """Largest difference of the head's logits from the probe's, over whole chains of three anchors."""
    stored, anchor, depth = store.read(row), probe["anchor"], probe["depth"]
    whole = [a for a in anchor.unique().tolist() if int((anchor == a).sum()) == positions]
    gaps = []
    for a in {whole[0], whole[len(whole) // 2], whole[-1]}:
        _, logits = DraftSession(head).draft(stored.token_ids[1 : a + 2], stored.aux[: a + 1], positions)
        mine = torch.nonzero(anchor == a)[:, 0]
        gaps.append((logits - probe["logits"][mine[depth[mine].argsort()]]).abs().max())
    return float(torch.stack(gaps).max())
