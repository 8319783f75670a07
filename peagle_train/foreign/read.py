"""A head of any maker, read as vLLM reads it and held against its target: the head, or all its faults."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

from peagle_train.export.checks import HeadFault, check_head, target_numbers
from peagle_train.export.config_checks import check_config
from peagle_train.export.contract import CONFIG_FILE, DTYPES, EMBEDDINGS, WEIGHTS_FILE
from peagle_train.export.faults import OWN_TARGET, REMOVE_KEY, brief, fault
from peagle_train.export.layout import build_head
from peagle_train.export.speculators import is_wrapped
from peagle_train.export.tensor_checks import held_faults
from peagle_train.files import read_json, sha256_of
from peagle_train.foreign.config import normalise_config, refuse_quantised, speculative_tokens
from peagle_train.foreign.findings import FETCH_AGAIN, Change, Findings
from peagle_train.foreign.tensors import (
    common_dtype,
    read_tensors,
    settle_placeholder,
    settle_vocabulary,
    weights_files,
)
from peagle_train.head.config import HeadConfig
from peagle_train.head.io import RECORD_FILE
from peagle_train.head.model import DrafterHead
from peagle_train.target.facts import TargetFacts


@dataclass(frozen=True)
class ForeignHead:
    """What was read.

    Attributes:
        head: the head in its own dtype; a table it shares with its target is not the target's
            (`export.layout.build_head`).
        dtype: in which it loses nothing.
        format: plain or speculators.
        sha256: of each file that was read, by name.
        changes: what reads otherwise in our layout; empty for a head of ours.
        k: tokens to draft that the head recommends; None if it does not say.
        provenance: what a head of ours recorded of its making; empty for others.
    """

    head: DrafterHead
    dtype: str
    format: str
    sha256: dict[str, str]
    changes: list[Change]
    k: int | None
    provenance: dict[str, Any]


def read_foreign(
    directory: Path, target: TargetFacts, *, aux_layers: Sequence[int] | None = None
) -> ForeignHead:
    """Reads a head directory of any format that vLLM 0.32 reads.

    Args:
        directory: config.json and safetensors.
        target: the model it drafts for.
        aux_layers: the layers it was trained on, where its config does not name them.

    Raises:
        HeadFault: with every fault found.
    """
    if (directory / RECORD_FILE).is_file():
        return _read_ours(directory, target, aux_layers)
    findings = Findings()
    raw = _read_config(directory, findings)
    if raw is not None:
        findings.file = CONFIG_FILE
        refuse_quantised(raw, findings)
    if findings.faults:
        raise HeadFault(str(directory), findings.faults)
    assert raw is not None
    findings.file = ""
    files = weights_files(directory, findings)
    tensors = read_tensors(files, findings)
    findings.file = CONFIG_FILE
    plain, method = normalise_config(
        raw, tensors=tensors.keys(), aux_layers=aux_layers, target=target, findings=findings
    )
    findings.file = label = files[0].name if len(files) == 1 else "weights"
    dtype = common_dtype(tensors, findings) if tensors else None
    plain["dtype"] = dtype or next(iter(DTYPES))
    named = raw.get("dtype") or raw.get("torch_dtype")
    if dtype and named is not None and str(named).removeprefix("torch.") != dtype:
        findings.change("dtype", brief(named), f"{dtype}, as the weights are stored")
    facts = target_numbers(target, {})
    config, _, faults = check_config(plain, method=method, facts=facts, trained={}, wrapped=False)
    told = {line.partition(": ")[2].partition(": ")[0] for line in findings.faults}
    findings.faults += [
        f"{CONFIG_FILE}: {_foreign(line)}" for line in faults if line.partition(": ")[0] not in told
    ]
    if config is not None and tensors:
        config = replace(config, own_embeddings=EMBEDDINGS in tensors)
        settle_placeholder(tensors, config.aux_width, findings)
        settle_vocabulary(tensors, config.vocab_size, config.draft_vocab_size, findings)
        faults = held_faults(tensors, config, facts)
        findings.faults += [_foreign(line).replace(WEIGHTS_FILE, label) for line in faults]
    if findings.faults or config is None or dtype is None:
        raise HeadFault(str(directory), findings.faults)
    return ForeignHead(
        head=_build(config, tensors, dtype),
        dtype=dtype,
        format="speculators" if is_wrapped(raw) else "plain",
        sha256={path.name: sha256_of(path) for path in (directory / CONFIG_FILE, *files)},
        changes=findings.rows(),
        k=speculative_tokens(raw),
        provenance={},
    )


def _read_ours(directory: Path, target: TargetFacts, aux_layers: Sequence[int] | None) -> ForeignHead:
    """A head that this program wrote: its record and checksums are part of the proof."""
    report = check_head(directory, target)
    config = report.config
    if aux_layers is not None and tuple(aux_layers) != config.aux_layers:
        wanted = f"{list(config.aux_layers)}, with which the head was trained; leave --aux-layers out"
        raise HeadFault(str(directory), [fault("--aux-layers", str(list(aux_layers)), wanted, OWN_TARGET)])
    provenance = read_json(directory / RECORD_FILE).get("provenance")
    provenance = provenance if isinstance(provenance, dict) else {}
    k = speculative_tokens(read_json(directory / CONFIG_FILE)) or provenance.get("k")
    return ForeignHead(
        head=build_head(config, load_file(str(directory / WEIGHTS_FILE))),
        dtype=report.dtype,
        format=report.format,
        sha256={name: sha256_of(directory / name) for name in (CONFIG_FILE, WEIGHTS_FILE)},
        changes=[],
        k=k if type(k) is int and k > 0 else None,
        provenance=provenance,
    )


def _build(config: HeadConfig, tensors: dict[str, Tensor], dtype: str) -> DrafterHead:
    wide = {name: tensor if name == "d2t" else tensor.to(DTYPES[dtype]) for name, tensor in tensors.items()}
    return build_head(config, wide)


def _read_config(directory: Path, findings: Findings) -> dict[str, Any] | None:
    path, wanted = directory / CONFIG_FILE, "a JSON object in UTF-8"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        findings.fault(CONFIG_FILE, "missing", wanted, "is this the folder of a head?")
    except (ValueError, RecursionError) as error:
        findings.fault(CONFIG_FILE, f"not readable ({error})", wanted)
    else:
        if isinstance(value, dict):
            return value
        findings.fault(CONFIG_FILE, f"holds a {type(value).__name__}", wanted)
    return None


def _foreign(line: str) -> str:
    """A fault of the checks with a cure for a head that we neither trained nor exported."""
    told, _, cure = line.rpartition("; ")
    return line if cure in (OWN_TARGET, REMOVE_KEY) else f"{told}; {FETCH_AGAIN}"
