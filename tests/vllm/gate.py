"""What the overfit gate is made of: targets whose text can be learned, a head for each, five planted faults.

The target is a twin, made sure of its words (`SURE`) and asked for eight answers with no near tie in them.
The head goes through the project's own road: answers with states, store, COD draws, KL loss, the loop,
export. Drafting by heart is easy for it, so whatever keeps it from drafting everything is a fault of the
road. The answers are unlike each other and themselves: a head can learn them by heart, but not guess what
it was not trained on, and a draft one token too early or too late is a wrong one.

An answer has 11 tokens: the first from the target's prefill, then two rounds of K = 4 drafts and the
target's own token. So the longest acceptance length possible is 5, and the very first slot counts for half.

Four of the faults are planted in a finished directory. Our checks refuse each of them, vLLM none: what it
costs is seen there alone. The fifth, training with an unshifted mask, leaves no trace but lost acceptance.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from data_prep.answer import Answer, answer
from peagle_train.errors import CorruptError
from peagle_train.export.checks import HeadFault, check_head
from peagle_train.export.contract import AUX_KEY, CONFIG_FILE, EMBEDDINGS, WEIGHTS_FILE
from peagle_train.export.layout import export_head
from peagle_train.head import alignment
from peagle_train.head.model import DrafterHead
from peagle_train.recipe.schema import CodSection, HeadSection, RopeSection
from peagle_train.store.states import StateRow, StateStore, StateWriter
from peagle_train.target.adapter import Target
from peagle_train.twin.models import MASK_TOKENS
from tests.training.conftest import Made
from tests.training.test_loop import make_loop
from tests.vllm.matrix import HIDDEN, TWINS

CLASSES = ("llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss", "gemma4")
"""Text classes by their twin; gemma4 stands for the conditional class too (test_gemma4_conditional.py)."""

K = 4
ROWS = 8
ANSWER = 1 + 2 * (K + 1)
AUX_LAYERS = [0, 1]  # a neighbour's states differ most where few layers have added to them
THETA = 100.0  # far from the 10,000 that vLLM takes where config.json is silent
TRAINING: dict[str, Any] = {
    "positions": K,
    "cod": CodSection(rate=0.8),
    "steps": 150,
    "batch_tokens": 32 * ROWS,
    "learning_rate": 1e-2,
    "loss": "kl",
    "validate_every": 150,
    "checkpoint_every": 150,
    "log_every": 150,
}

SURE = 4.0
"""By what a twin's logits are multiplied: the greedy text stays, its lead over other text grows."""
QUIET = 0.2
"""By what its embeddings are: at 0.03, as in real models, training takes them far from where they start."""
LEAD = 0.2
"""Least lead of every answered token, in logits: no float32 implementation chooses another one."""
DISTINCT = 8
LOOP = 0.3
# The twin's softcap of 5 would flatten what SURE raises; 30 is the real model's.
CHANGES: dict[str, dict[str, Any]] = {"gemma4": {"final_logit_softcapping": 30.0}}


@dataclass(frozen=True)
class Subject:
    """A target of one class, what it answered with the states of all of it, and a store of those.

    The store's `train` and `validation` rows are the same eight.
    """

    name: str
    target: Target
    made: list[Answer]
    store: StateStore

    @property
    def prompts(self) -> list[list[int]]:
        return [made.token_ids[: made.prompt_length] for made in self.made]

    @property
    def answers(self) -> list[list[int]]:
        return [made.token_ids[made.prompt_length :] for made in self.made]


def make_subject(name: str, room: Path) -> Subject:
    """Makes the twin, finds eight prompts it answers well, and extracts the states."""
    twin = TWINS[name]
    changes = {**twin.changes, **CHANGES.get(name, {})}
    folder = twin.make(room / "target", layers=twin.layers, hidden=HIDDEN, **changes)
    _temper(folder / WEIGHTS_FILE)
    target = Target.load(folder, dtype="float32", device="cpu")
    found: list[Answer] = []
    for prompts in _candidates():
        answers = answer(target, prompts, max_new_tokens=ANSWER, aux_layers=AUX_LAYERS, keep=torch.float32)
        found += [made for made in answers if _fit(made, target, MASK_TOKENS[name])]
        if len(found) >= ROWS:
            break
    found = found[:ROWS]
    assert len(found) == ROWS, f"{name}: only {len(found)} prompts have answers fit for the gate"
    return Subject(name, target, found, _store(target, found, room / "states"))


def _temper(file: Path) -> None:
    weights = load_file(file)
    tied = "lm_head.weight" not in weights
    weights["model.embed_tokens.weight"] *= QUIET
    weights["model.norm.weight"] *= SURE / QUIET if tied else SURE
    save_file(weights, file, metadata={"format": "pt"})


def _candidates() -> Iterator[list[list[int]]]:
    """Batches of prompts, of 4 to 7 ordinary tokens each."""
    generator = torch.Generator().manual_seed(1)
    for _ in range(8):
        yield [torch.randint(8, 109, (4 + i % 4,), generator=generator).tolist() for i in range(48)]


def _fit(made: Answer, target: Target, mask_token: int) -> bool:
    """Whether an answer is whole, no loop, free of the mask token, and never near a tie."""
    tokens = made.token_ids[made.prompt_length :]
    if made.finish == "stop" or mask_token in tokens or not _varied(tokens):
        return False
    assert made.last is not None
    best = target.logits(made.last[made.prompt_length - 1 :]).topk(2).values
    return float((best[:, 0] - best[:, 1]).min()) > LEAD


def _varied(tokens: list[int]) -> bool:
    """Many distinct tokens, and unlike itself when shifted by up to K."""
    shifted = (
        sum(a == b for a, b in zip(tokens, tokens[by:], strict=False)) / (len(tokens) - by)
        for by in range(1, K + 1)
    )
    return len(set(tokens)) >= DISTINCT and max(shifted) < LOOP


def _store(target: Target, answers: list[Answer], directory: Path) -> StateStore:
    directory.mkdir()
    writer = StateWriter(directory, "gate", AUX_LAYERS, target.facts.hidden_size, "float32")
    rows = []
    for made in answers:
        assert made.aux is not None and made.last is not None
        generated = torch.arange(len(made.token_ids)) >= made.prompt_length
        rows.append((torch.tensor(made.token_ids), generated, made.aux, made.last, made.prompt_length))
    for batch, name in enumerate(("train", "validation")):
        first = batch * ROWS
        writer.write_batch(
            batch, [StateRow(first + i, name, f"{name} {i}", *row) for i, row in enumerate(rows)]
        )
    writer.seal()
    return StateStore(directory)


def train(subject: Subject, directory: Path) -> DrafterHead:
    """The head after the last step; its draft vocabulary is what the answers hold."""
    ends = subject.target.end_token_ids
    section = HeadSection(
        layers=2,
        aux_layers=AUX_LAYERS,
        mask_token=MASK_TOKENS[subject.name],
        draft_vocab_size=len({token for tokens in subject.answers for token in tokens} | set(ends)),
        rope=RopeSection(rope_type="default", rope_theta=THETA),
        embeddings="own",
        initialise="random",
    )
    loop = make_loop(Made(subject.target, subject.store), directory, head=section, **TRAINING)
    loop.run()
    return loop.head


def export(head: DrafterHead, subject: Subject, directory: Path) -> None:
    """Writes the head as vLLM reads it, past all checks."""
    export_head(head, directory, target=subject.target.facts, dtype="float32")


# --- The faults


UNSHIFTED = "unshifted mask"
AUX, EMBEDDED, D2T, ROPE = "aux ids off by one", "untrained embeddings", "d2t lost", "wrong rope"
FAULTS = (UNSHIFTED, AUX, EMBEDDED, D2T, ROPE)


def plant(fault: str, sound: Path, directory: Path, subject: Subject) -> None:
    """Puts a broken head into `directory`: a damaged copy of the sound one, or one trained wrongly."""
    if fault == UNSHIFTED:
        head = _train_unshifted(subject, directory.with_name(f"{directory.name}, training"))
        export(head, subject, directory)  # nothing on the disk shows it
        return
    shutil.copytree(sound, directory)
    _damage(fault, directory, subject.target)
    with pytest.raises(HeadFault):
        check_head(directory, subject.target.facts)


def _train_unshifted(subject: Subject, directory: Path) -> DrafterHead:
    """Trained as if the mask were one of slots: slot i carries loss where x[i] was generated, not x[i+1].

    The store is written by the same wrong rule: a right one holds other states, and says so when it is read.
    """
    shifted = alignment.turn_ends

    def by_slot(loss_mask: Tensor) -> Tensor:
        return torch.cat([torch.zeros(1, dtype=torch.int64), shifted(loss_mask)[:-1]])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(alignment, "turn_ends", by_slot)
        with pytest.raises(CorruptError, match="numbers, expected"):
            subject.store.read(0)
        store = _store(subject.target, subject.made, directory.with_name(f"{directory.name}, states"))
        return train(replace(subject, store=store), directory)


def _damage(fault: str, directory: Path, target: Target) -> None:
    """Edits one file of a finished head behind the exporter's back."""
    file = directory / (CONFIG_FILE if fault in (AUX, ROPE) else WEIGHTS_FILE)
    if file.name == CONFIG_FILE:
        config = json.loads(file.read_text())
        if fault == AUX:
            config[AUX_KEY] = config["eagle_config"][AUX_KEY] = [layer + 1 for layer in AUX_LAYERS]
        else:
            del config["rope_theta"]
        file.write_text(json.dumps(config))
    else:
        tensors = load_file(file)
        if fault == D2T:
            del tensors["d2t"]
        else:
            tensors[EMBEDDINGS] = target.embedding_table().clone()
        save_file(tensors, file, metadata={"format": "pt"})
