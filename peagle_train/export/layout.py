"""Writes a head as the directory vLLM loads, and reads such a directory back.

    HEAD/config.json         what vLLM reads (contract.py; speculators.py for the other format)
    HEAD/model.safetensors   the tensors under vLLM's names; embeddings only if the head trained its own
    HEAD/export.json         what we record: the head's config, the target, SHA-256, where it came from

The directory is built and proven under a temporary name: the checks of checks.py hold, every tensor read
back equals the trained one bit for bit in the export's dtype, and so do the logits. Only then does it
appear under its own name; a failed export leaves nothing.
"""

from __future__ import annotations

import copy
import importlib.metadata
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from peagle_train.errors import PeagleError
from peagle_train.export import speculators
from peagle_train.export.checks import HeadFault, HeadReport, check_head
from peagle_train.export.contract import (
    CONFIG_FILE,
    DTYPES,
    EMBEDDINGS,
    WEIGHTS_FILE,
    plain_config,
    tensor_shapes,
)
from peagle_train.export.faults import fault
from peagle_train.files import atomic_directory, sha256_of, write_json
from peagle_train.head.config import HeadConfig
from peagle_train.head.io import RECORD_FILE
from peagle_train.head.model import DrafterHead
from peagle_train.head.session import DraftSession
from peagle_train.tensors import save_tensors

if TYPE_CHECKING:
    from peagle_train.target.source import TargetFacts

RECORD_VERSION = 1
REPORT = "this is a fault of the exporter: please report it"
WRITER = f"peagle-train {importlib.metadata.version('peagle-train')}"


def export_head(
    head: DrafterHead,
    directory: Path,
    *,
    target: TargetFacts,
    dtype: str = "bfloat16",
    format: str = "plain",
    target_reference: str | None = None,
    speculative_tokens: int = 5,
    extra: dict[str, Any] | None = None,
    finish: Callable[[Path], object] | None = None,
) -> HeadReport:
    """Writes and proves one head directory.

    Args:
        head: the trained head, on any device, in any floating dtype.
        directory: appears whole, replacing what stood there, or not at all.
        target: the model the head was trained for.
        dtype: float32, bfloat16 or float16.
        format: plain, or speculators (`vllm serve HEAD` finds target, method and K by itself).
        target_reference: folder or Hub id under which vLLM finds the target; default `target.model`.
        speculative_tokens: K written into a speculators config; plain ones get it when served.
        extra: recorded under `provenance` in export.json (run, seed, checkpoint ...).
        finish: called with the proven, still temporary directory, to put more into it.

    Raises:
        HeadFault: the head does not fit the target, is not finite, or did not survive the way to the disk.
    """
    tensors = exported_tensors(head, DTYPES[dtype])
    plain = plain_config(head.config, dtype)
    reference = target_reference or target.model
    config = plain
    if format == "speculators":
        config = speculators.wrap(
            plain,
            method=head.config.method,
            target=reference,
            target_class=target.class_name,
            speculative_tokens=speculative_tokens,
            writer=WRITER,
        )
    with atomic_directory(directory) as temporary:
        write_json(temporary / CONFIG_FILE, config)
        save_tensors(temporary / WEIGHTS_FILE, tensors, {"format": "pt"})
        record = {
            "version": RECORD_VERSION,
            "writer": WRITER,
            "head": head.config.to_dict(),
            "target": {
                "model": target.model,
                "reference": reference,
                "class_name": target.class_name,
                "num_layers": target.num_layers,
                "hidden_size": target.hidden_size,
                "vocab_size": target.vocab_size,
                "max_position_embeddings": target.max_position_embeddings,
                "kv_layers": target.kv_layers,
            },
            "sha256": {name: sha256_of(temporary / name) for name in (CONFIG_FILE, WEIGHTS_FILE)},
            "provenance": extra or {},
        }
        write_json(temporary / RECORD_FILE, record)
        report = check_head(temporary, target, shown_as=str(directory))
        _prove_read_back(head, temporary, report, str(directory))
        if finish is not None:
            finish(temporary)
    return replace(report, directory=directory)


def read_head(directory: Path, *, shared_embeddings: Tensor | None = None) -> DrafterHead:
    """Reads an exported head of either format, in the dtype it was exported in.

    Args:
        directory: a head directory; it is checked first.
        shared_embeddings: [V, H], the target's unscaled embedding table; needed by a head that has none.

    Raises:
        HeadFault: the directory is not a sound head.
        PeagleError: the head shares the target's embeddings and none, or a table of another shape, was given.
    """
    return _load(Path(directory), check_head(directory).config, shared_embeddings)


def _load(directory: Path, config: HeadConfig, shared_embeddings: Tensor | None) -> DrafterHead:
    tensors = load_file(str(directory / WEIGHTS_FILE))
    if not config.own_embeddings:
        wanted = (config.vocab_size, config.hidden_size)
        if shared_embeddings is None or tuple(shared_embeddings.shape) != wanted:
            given = "none was given" if shared_embeddings is None else f"got {list(shared_embeddings.shape)}"
            raise PeagleError(
                f"{directory}: this head shares its target's embeddings; expected the target's table "
                f"{list(wanted)}, {given}; pass shared_embeddings"
            )
        tensors[EMBEDDINGS] = shared_embeddings.detach().clone()
    return build_head(config, tensors)


def build_head(config: HeadConfig, tensors: dict[str, Tensor]) -> DrafterHead:
    """The head that a sound config and its tensors make, in their dtype.

    A table that it shares with its target may be left out: random numbers stand in its place then, good
    enough to export the head, which leaves the table out again, but not to draft with it.
    """
    head = DrafterHead(config)
    state = {EMBEDDINGS: head.embed_tokens.weight.detach(), **tensors}
    if config.method == "peagle":
        state["mask_hidden"] = state["mask_hidden"].reshape(1, 1, -1)
    head.load_state_dict(state, assign=True)
    head.embed_tokens.weight.requires_grad_(config.own_embeddings)
    return head


def exported_tensors(head: DrafterHead, dtype: torch.dtype) -> dict[str, Tensor]:
    """The tensors of model.safetensors: on the CPU, contiguous, in the export's dtype; d2t stays int64."""
    state = head.state_dict()
    return {
        name: state[name].detach().to("cpu", torch.int64 if name == "d2t" else dtype).contiguous()
        for name in tensor_shapes(head.config)
    }


def _prove_read_back(head: DrafterHead, directory: Path, report: HeadReport, shown: str) -> None:
    """The head on the disk equals the trained one, rounded to its dtype: config, tensors, drafts, logits."""
    trained = _rounded(head, DTYPES[report.dtype])
    table = None if head.config.own_embeddings else trained.embed_tokens.weight
    stored = _rounded(_load(directory, report.config, table), DTYPES[report.dtype])
    faults = []
    if stored.config != head.config:
        faults.append(fault(CONFIG_FILE, str(stored.config), str(head.config), REPORT))
    expected = trained.state_dict()
    for name, tensor in stored.state_dict().items():
        if not torch.equal(tensor, expected[name]):
            faults.append(fault(f"{WEIGHTS_FILE}: {name}", "other values", "the trained ones", REPORT))
    for name, left, right in zip(("drafts", "logits"), _probe(trained), _probe(stored), strict=True):
        if not torch.equal(left, right):
            faults.append(fault(WEIGHTS_FILE, f"{name} differ", "those of the trained head", REPORT))
    if faults:
        raise HeadFault(shown, faults)


def _rounded(head: DrafterHead, dtype: torch.dtype) -> DrafterHead:
    """A copy on the CPU that computes in float32 with parameters rounded to `dtype`."""
    return copy.deepcopy(head).cpu().to(dtype).float()


def _probe(head: DrafterHead) -> tuple[Tensor, Tensor]:
    """Drafts [3] and logits [3, DV] over a fixed random context."""
    config = head.config
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(0, config.vocab_size, (6,), generator=generator)
    aux = torch.randn(6, config.aux_width, generator=generator)
    return DraftSession(head).draft(tokens, aux, 3)
