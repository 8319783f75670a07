"""The parts of a target that a head starts from and learns against, read without loading the target.

A head needs the embedding and output tables, the final norm and the last few decoder layers: of a 120 B
target some 3 GB of 65. They are read by name from its safetensors, and the names come from the class itself,
built without memory. Where a name is not there, or a tensor is quantised, the target is loaded whole, as
it is for answers and states.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import safe_open
from torch import Tensor

from peagle_train.errors import PeagleError
from peagle_train.target.adapter import Target, TargetOutput
from peagle_train.target.facts import TargetFacts, read_facts
from peagle_train.target.tokens import end_tokens_of

INDEX = "model.safetensors.index.json"


class TargetParts(Protocol):
    """What training reads of a target; `Target` has it too."""

    facts: TargetFacts
    tokenizer: Any
    end_token_ids: tuple[int, ...]

    def embedding_table(self) -> Tensor:
        """[V, H], as stored."""

    def head_table(self) -> Tensor:
        """[V, H], the output head's weight."""

    def final_norm_weight(self) -> Tensor:
        """[H], the scale of the final norm."""

    def last_layers(self, count: int) -> list[dict[str, Tensor]]:
        """Parameters of the last decoder layers by their names within a layer, in order."""

    def output_head(self, token_ids: Tensor | None = None) -> TargetOutput:
        """Everything between the last state and the logits of token_ids [T] (left out: all)."""


class StoredParts:
    """The parts of a target's folder, on the CPU: a `TargetParts`."""

    def __init__(
        self,
        facts: TargetFacts,
        tokenizer: Any,
        end_token_ids: tuple[int, ...],
        norm: Any,
        tables: tuple[Tensor, Tensor],
        layers: Sequence[dict[str, Tensor]],
    ):
        self.facts, self.tokenizer, self.end_token_ids = facts, tokenizer, end_token_ids
        self._norm, (self._embeddings, self._head), self._layers = norm, tables, list(layers)

    def embedding_table(self) -> Tensor:
        return self._embeddings

    def head_table(self) -> Tensor:
        return self._head

    def final_norm_weight(self) -> Tensor:
        weight: Tensor = self._norm.weight.detach()
        return weight

    def last_layers(self, count: int) -> list[dict[str, Tensor]]:
        return self._layers[len(self._layers) - count :]

    def output_head(self, token_ids: Tensor | None = None) -> TargetOutput:
        weight = self._head.clone() if token_ids is None else self._head[token_ids]
        return TargetOutput(copy.deepcopy(self._norm), weight, self.facts.logit_softcap)


def load_parts(
    folder: Path, *, dtype: str, layers: int, wanted: Collection[str], trust_remote_code: bool = False
) -> TargetParts:
    """The parts of a target, on the CPU in `dtype`.

    Args:
        folder: as `source.obtain` returns it.
        layers: how many of its last decoder layers.
        wanted: names of parameters within a layer; others are left out.

    Raises PeagleError as `Target.load`.
    """
    found = _read(folder, dtype, layers, wanted, trust_remote_code)
    if found is not None:
        return found
    return Target.load(folder, dtype=dtype, device="cpu", trust_remote_code=trust_remote_code)


def _read(
    folder: Path, dtype: str, layers: int, wanted: Collection[str], trust_remote_code: bool
) -> StoredParts | None:
    """The parts by their names; None if one of them is not there under its name, or not as plain numbers."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    config = AutoConfig.from_pretrained(folder, trust_remote_code=trust_remote_code)
    facts = read_facts(config, str(folder))
    with torch.device("meta"):
        model: Any = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    decoder = model.get_decoder()
    embeddings, head = model.get_input_embeddings().weight, model.get_output_embeddings().weight
    blocks = [
        {name: names[id(p)] for name, p in layer.named_parameters() if name in wanted}
        for layer in list(decoder.layers)[max(0, facts.num_layers - layers) :]
    ]
    norm_name = names[id(decoder.norm.weight)]
    needed = [names[id(embeddings)], norm_name, *(name for block in blocks for name in block.values())]
    if not facts.tie_word_embeddings:
        needed.append(names[id(head)])
    tensors = _named(folder, needed, getattr(torch, dtype))
    if tensors is None or model.get_output_embeddings().bias is not None:
        return None
    norm = decoder.norm.to_empty(device="cpu").to(getattr(torch, dtype)).requires_grad_(False)
    norm.weight.copy_(tensors[norm_name])
    table = tensors[names[id(embeddings)]]
    output = table if facts.tie_word_embeddings else tensors[names[id(head)]]
    for name, found in (("embedding", table), ("output", output)):
        if found.shape != (facts.vocab_size, facts.hidden_size):
            raise PeagleError(
                f"target {folder}: its {name} table is {list(found.shape)}, its config says "
                f"{[facts.vocab_size, facts.hidden_size]}; obtain the target again"
            )
    tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust_remote_code)
    ends = end_tokens_of(folder, tokenizer, facts.model, trust_remote_code=trust_remote_code)
    read = [{name: tensors[full] for name, full in block.items()} for block in blocks]
    return StoredParts(facts, tokenizer, ends, norm, (table, output), read)


def _named(folder: Path, names: Sequence[str], dtype: torch.dtype) -> dict[str, Tensor] | None:
    """The tensors of some names in `dtype`; None unless all are there as floats of 16 bits or more."""
    files = _files(folder)
    if not set(names) <= set(files):
        return None
    tensors: dict[str, Tensor] = {}
    for name in names:
        with safe_open(files[name], framework="pt") as file:
            tensor = file.get_tensor(name)
        if not tensor.is_floating_point() or tensor.element_size() < 2:
            return None
        tensors[name] = tensor.to(dtype)
    return tensors


def _files(folder: Path) -> Mapping[str, Path]:
    """File of every tensor."""
    index = folder / INDEX
    if index.is_file():
        named = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
        return {name: folder / file for name, file in named.items()}
    files: dict[str, Path] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as file:
            files |= dict.fromkeys(file.keys(), path)
    return files
