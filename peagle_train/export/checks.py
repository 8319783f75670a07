"""Proves that a directory is a head vLLM will draft with, or lists everything that speaks against it.

vLLM itself loads a head with a missing norm, a foreign d2t or NaN weights without a word and drafts
garbage (vllm/model_executor/models/llama_eagle3.py, `load_weights`). So the proof is ours. It reads the
directory as a stranger's: nothing in it may raise anything but `HeadFault`.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from peagle_train.errors import FaultsError
from peagle_train.export import speculators
from peagle_train.export.config_checks import check_config
from peagle_train.export.contract import CONFIG_FILE, OPTIONS, WEIGHTS_FILE, method_of
from peagle_train.export.faults import AGAIN, brief, fault, what_stands_at
from peagle_train.export.serving import serving_flags
from peagle_train.export.tensor_checks import check_tensors, tensor_names
from peagle_train.files import sha256_of
from peagle_train.head.config import HeadConfig, Method
from peagle_train.head.io import RECORD_FILE
from peagle_train.target.facts import KVLayer

if TYPE_CHECKING:
    from peagle_train.target.source import TargetFacts


class HeadFault(FaultsError):
    """All faults of one head directory: file, key or tensor, found, expected, cure."""


@dataclass(frozen=True)
class HeadReport:
    """What was proven about a head."""

    directory: Path
    format: str  # "plain" or "speculators"
    config: HeadConfig
    dtype: str
    parameters: int
    size: int  # bytes of model.safetensors
    weights_sha256: str
    target: str | None  # the model named by export.json; None for a head without that file
    flags: tuple[str, ...] = ()  # of `vllm serve`, as far as the target is known

    def rows(self) -> list[tuple[str, str]]:
        """Name and value of every line of the table that export prints."""
        head = self.config
        vocabulary = f"{head.draft_vocab_size:,} of {head.vocab_size:,} tokens"
        return [
            ("format", self.format),
            ("target", self.target or "not recorded"),
            ("method", "parallel (peagle)" if head.method == "peagle" else "sequential (eagle3)"),
            ("layers", f"{head.num_layers}, as in {head.drafter}" + _options(head)),
            ("aux layers", ", ".join(str(layer) for layer in head.aux_layers)),
            ("draft vocabulary", vocabulary if head.reduced_vocabulary else "full"),
            ("embeddings", "own" if head.own_embeddings else "shared with the target"),
            ("mask token id", "none" if head.mask_token_id is None else str(head.mask_token_id)),
            ("RoPE", _rope(head)),
            ("longest context", f"{head.max_position_embeddings:,} tokens"),
            ("parameters", f"{self.parameters / 1e6:,.1f} M in {self.dtype}, {self.size / 1e6:,.1f} MB"),
            ("SHA-256", self.weights_sha256),
            *(("serving needs", flag) for flag in self.flags),
        ]


def _options(head: HeadConfig) -> str:
    """The options that are on, and the windows."""
    on = [name for name in OPTIONS if getattr(head, name)]
    sliding = sum(window is not None for window in head.windows)
    if sliding:
        on.append(f"{sliding} with a window of {head.sliding_window:,}")
    return "".join(f", {name}" for name in on)


def _rope(head: HeadConfig) -> str:
    rope = head.rope
    kind = "" if rope.rope_type == "default" else f", {rope.rope_type}"
    return f"theta {rope.theta:,g}{kind}" + "".join(f", {key} {value}" for key, value in rope.scaling.items())


def check_head(
    directory: Path | str, target: TargetFacts | None = None, *, shown_as: str | None = None
) -> HeadReport:
    """Checks a head directory of either format.

    Args:
        directory: holds config.json, model.safetensors and, if we exported it, export.json.
        target: facts to hold the head against; None: those that export.json recorded, if any.
        shown_as: how messages name the directory (an export is checked under a temporary name).

    Raises:
        HeadFault: with every fault found.
    """
    directory = Path(directory)
    shown = shown_as or str(directory)
    if not directory.is_dir():
        cure = f"check the path or {AGAIN}"
        raise HeadFault(
            shown, [fault("directory", what_stands_at(directory), "one that `peagle export` wrote", cure)]
        )
    faults: list[str] = []

    record = _read_object(directory / RECORD_FILE, faults) if (directory / RECORD_FILE).exists() else {}
    raw = _read_object(directory / CONFIG_FILE, faults)
    if raw is None:
        faults += check_tensors(directory, None, None, claimed_own=None, facts={})[2]
        raise HeadFault(shown, faults)

    wrapped = speculators.is_wrapped(raw)
    plain = raw
    if wrapped:
        plain, found = speculators.unwrap(raw)
        faults += [f"{CONFIG_FILE}: {line}" for line in found]

    facts = target_numbers(target, record or {})
    trained = _section(record or {}, "head")
    method = _method(plain, trained, directory)
    config, dtype, found = check_config(plain, method=method, facts=facts, trained=trained, wrapped=wrapped)
    faults += [f"{CONFIG_FILE}: {line}" for line in found]

    claimed_own = trained.get("own_embeddings")
    config, parameters, found = check_tensors(directory, config, dtype, claimed_own=claimed_own, facts=facts)
    faults += found
    faults += _checksum_faults(directory, record or {})
    flags: tuple[str, ...] = ()
    if config is not None:
        try:
            flags = serving_flags(config, facts.get("kv_layers", ()))
        except ValueError as error:
            wanted = "a head that vLLM can serve beside its target"
            faults.append(
                fault(f"{CONFIG_FILE}: sliding_window", str(error), wanted, "train without windows")
            )
    if faults or config is None or dtype is None:
        raise HeadFault(shown, faults)
    weights = directory / WEIGHTS_FILE
    return HeadReport(
        directory=directory,
        format="speculators" if wrapped else "plain",
        config=config,
        dtype=dtype,
        parameters=parameters,
        size=weights.stat().st_size,
        weights_sha256=sha256_of(weights),
        target=facts.get("model"),
        flags=flags,
    )


def _method(config: dict[str, Any], trained: dict[str, Any], directory: Path) -> Method:
    """How the head drafts: as it was trained, else as its config or its placeholder state tell."""
    if trained.get("method") in ("peagle", "eagle3"):
        return cast(Method, trained["method"])
    if "mask_hidden" in tensor_names(directory):
        return "peagle"
    return method_of(config)


def _read_object(path: Path, faults: list[str]) -> dict[str, Any] | None:
    """A JSON object, or None and a fault."""
    wanted = "a JSON object in UTF-8"
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        faults.append(fault(path.name, "missing", wanted))
    except json.JSONDecodeError as error:
        faults.append(fault(path.name, f"line {error.lineno}: {error.msg}", wanted, f"mend it or {AGAIN}"))
    except (ValueError, RecursionError):  # not UTF-8, a number of thousands of digits, endless nesting
        faults.append(fault(path.name, "not JSON text", wanted))
    except OSError as error:
        faults.append(fault(path.name, f"cannot be read ({error.strerror})", wanted, "check its permissions"))
    else:
        if isinstance(value, dict):
            return value
        faults.append(fault(path.name, f"holds a {type(value).__name__}", wanted))
    return None


def _section(record: dict[str, Any], key: str) -> dict[str, Any]:
    value = record.get(key)
    return value if isinstance(value, dict) else {}


def target_numbers(target: TargetFacts | None, record: dict[str, Any]) -> dict[str, Any]:
    """The numbers a head must fit: the given target's, else those of export.json, wrong types dropped."""
    names: dict[str, type] = dict.fromkeys(
        ("num_layers", "hidden_size", "vocab_size", "max_position_embeddings"), int
    )
    names["model"] = str
    if target is not None:
        return {name: getattr(target, name) for name in (*names, "kv_layers")}
    recorded = _section(record, "target")
    facts = {name: recorded[name] for name, kind in names.items() if type(recorded.get(name)) is kind}
    return {**facts, "kv_layers": _kv_layers(recorded.get("kv_layers"))}


def _kv_layers(value: Any) -> list[KVLayer]:
    """What export.json says of the target's layers; none of it if anything is wrong with it."""
    if not isinstance(value, list):
        return []
    sound = all(
        isinstance(layer, list)
        and len(layer) == 3
        and all(type(number) is int and number > 0 for number in layer[1:])
        and (layer[0] is None or (type(layer[0]) is int and layer[0] > 0))
        for layer in value
    )
    return [KVLayer(*layer) for layer in value] if sound else []


def _checksum_faults(directory: Path, record: dict[str, Any]) -> list[str]:
    """Files that are not what the export wrote: damage that leaves every number finite is seen only here."""
    faults = []
    for name in (CONFIG_FILE, WEIGHTS_FILE):
        expected = _section(record, "sha256").get(name)
        if expected is None or not (directory / name).is_file():
            continue  # a head of another maker, or already a fault
        now = sha256_of(directory / name)
        if now != expected:
            wanted = f"{brief(expected)} by {RECORD_FILE}: the file changed after the export"
            faults.append(fault(name, f"SHA-256 {now}", wanted, f"copy it again or {AGAIN}"))
    return faults
