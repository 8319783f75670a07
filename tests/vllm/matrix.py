"""Every head layout on a fitting target: what `make test-vllm` trains, exports and serves.

Each row is met by a head with random weights and by one trained briefly, and each of these at K = 4 and 7.
An engine takes seconds to start, so `make test-vllm` meets every row once with each kind of weights and once
with each K; `make test-all` adds the other two of its four engines.
A row names what differs from a plain head: one layer of 2 query heads and 1 KV head, own embeddings, the
whole vocabulary, plain format, the target's RoPE base.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peagle_train.head.config import FULL, SLIDING
from peagle_train.head.rope import Rope
from peagle_train.twin import models as twins

SMOLLM2 = "smollm2"
HIDDEN = 128  # vLLM's attention on a CPU wants heads of at least 32
KS = (4, 7)


@dataclass(frozen=True)
class TwinSpec:
    """A random twin; `changes` are keys of its config."""

    make: Callable[..., Path]
    layers: int = 5
    changes: dict[str, Any] = field(default_factory=dict)


TWINS: dict[str, TwinSpec] = {
    "llama": TwinSpec(twins.tiny_llama, changes={"rope_theta": 30000.0}),
    "qwen2": TwinSpec(twins.tiny_qwen2),
    "qwen3": TwinSpec(twins.tiny_qwen3),
    "qwen3_moe": TwinSpec(twins.tiny_qwen3_moe),
    # 10 sliding and 10 full layers: four more full ones still make one KV cache group of 14.
    "gpt_oss": TwinSpec(twins.tiny_gpt_oss, layers=20),
    # 4 and 4: four more do not, so the head is served without the hybrid KV cache manager.
    "short gpt_oss": TwinSpec(twins.tiny_gpt_oss, layers=8),
    "gemma4": TwinSpec(twins.tiny_gemma4, layers=24),
    "wide gemma4": TwinSpec(twins.tiny_gemma4, layers=6, changes={"vocab": 262_144}),
}


@dataclass(frozen=True)
class Layout:
    """A row of the matrix.

    head: fields of HeadConfig that differ from the plain head's. aux: tapped layers. steps: of brief
    training. initialise: weights of the head that is called random.
    """

    name: str
    target: str = "llama"
    aux: tuple[int, ...] = (1, 3, 5)
    layers: int = 1
    draft_vocab_size: int | None = None
    own: bool = True
    format: str = "plain"
    steps: int = 80
    initialise: str = "random"
    head: dict[str, Any] = field(default_factory=dict)


YARN = Rope(10_000.0, "yarn", factor=32.0, original_max_position_embeddings=16, truncate=False)
LLAMA3 = Rope(
    30_000.0,
    "llama3",
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_position_embeddings=64,
)
QWEN3 = {"drafter": "qwen3"}
ARITHMETIC = {
    **QWEN3,
    "attention_bias": True,
    "norm_before_residual": True,
    "norm_before_fc": True,
    "fc_norm": True,
    "rope": YARN,
}
EAGLE3 = {"method": "eagle3", "mask_token_id": None}

LAYOUTS = [
    # Vocabulary, embeddings, depth, format.
    Layout("one layer"),
    Layout("four layers, reduced", layers=4, aux=(0, 2), draft_vocab_size=200),
    Layout("four layers, shared", layers=4, aux=(0, 2), own=False, format="speculators"),
    Layout("reduced, shared", draft_vocab_size=160, own=False, format="speculators"),
    Layout("vocabulary of 262,144", target="wide gemma4", aux=(2, 4), steps=16),
    # Every class of target.
    Layout("qwen2", target="qwen2", layers=2),
    Layout("qwen3", target="qwen3", layers=2, own=False),
    Layout("qwen3_moe", target="qwen3_moe", layers=2, draft_vocab_size=160),
    Layout("gpt_oss", target="gpt_oss", layers=4, aux=(2, 10, 17), head={"num_key_value_heads": 2}),
    Layout("gpt_oss, short", target="short gpt_oss", layers=4, aux=(2, 4, 5), format="speculators"),
    Layout("gemma4", target="gemma4", layers=4, aux=(2, 12, 21), own=False, head={"num_key_value_heads": 2}),
    # Which layers are tapped; 0 is the embeddings, L the last layer before the final norm.
    Layout("two aux layers", aux=(0, 5)),
    Layout("five aux layers", target="qwen2", aux=(0, 1, 2, 4, 5)),
    # The drafter's own arithmetic.
    Layout("qwen3 drafter", target="qwen3", layers=2, head=QWEN3),
    Layout(
        "qwen3 drafter, biases",
        target="qwen3_moe",
        layers=2,
        format="speculators",
        head={**QWEN3, "attention_bias": True},
    ),
    Layout("biases", target="qwen2", layers=2, head={"attention_bias": True}),
    Layout("norm before residual", layers=2, head={"norm_before_residual": True}),
    Layout("norm before fc", layers=2, format="speculators", head={"norm_before_fc": True}),
    Layout("fc norm", target="qwen3", layers=2, head={"fc_norm": True}),
    Layout(
        "both norms, qwen3 drafter",
        target="qwen3",
        format="speculators",
        head={**QWEN3, "norm_before_fc": True, "fc_norm": True, "norm_before_residual": True},
    ),
    Layout("narrower than the target", layers=2, head={"hidden_size": 96}),
    Layout("wider than the target", target="qwen3", layers=2, head={**QWEN3, "hidden_size": 160}),
    Layout("linear rope", layers=2, steps=200, head={"rope": Rope(30_000.0, "linear", factor=4.0)}),
    Layout("llama3 rope", layers=2, head={"rope": LLAMA3}),
    Layout("yarn rope", target="gpt_oss", layers=2, steps=200, aux=(2, 10, 17), head={"rope": YARN}),
    Layout("yarn rope, qwen3 drafter", target="qwen3", format="speculators", head={**QWEN3, "rope": YARN}),
    Layout("sliding", layers=2, head={"layer_types": (SLIDING, SLIDING), "sliding_window": 6}),
    Layout(
        "sliding, qwen3 drafter",
        target="qwen3",
        layers=2,
        format="speculators",
        head={**QWEN3, "layer_types": (SLIDING, SLIDING), "sliding_window": 6},
    ),
    Layout(
        "full and sliding",
        target="qwen2",
        layers=3,
        head={"layer_types": (FULL, SLIDING, FULL), "sliding_window": 6},
    ),
    Layout(
        "all at once",
        target="qwen3_moe",
        aux=(0, 2, 3, 5),
        layers=2,
        draft_vocab_size=160,
        head={
            **ARITHMETIC,
            "hidden_size": 96,
            "layer_types": (SLIDING, FULL),
            "sliding_window": 6,
        },
    ),
    # The real model, its chat template, answers that end early.
    Layout(
        "SmolLM2", SMOLLM2, aux=(2, 15, 27), draft_vocab_size=4096, own=False, steps=120, initialise="target"
    ),
    Layout(
        "SmolLM2, four layers",
        SMOLLM2,
        aux=(2, 15, 27),
        layers=4,
        format="speculators",
        steps=24,
        initialise="target",
    ),
    # The sequential baseline: one pass per drafted token, each fed with the state of the one before.
    Layout("eagle3", head=EAGLE3),
    Layout(
        "eagle3, reduced, shared",
        layers=2,
        aux=(0, 2),
        draft_vocab_size=160,
        own=False,
        format="speculators",
        head=EAGLE3,
    ),
    Layout("eagle3, norm output", layers=2, head={**EAGLE3, "norm_output": True}),
    Layout(
        "eagle3, full and sliding",
        target="qwen2",
        layers=3,
        head={**EAGLE3, "layer_types": (FULL, SLIDING, FULL), "sliding_window": 6},
    ),
    Layout(
        "eagle3, all at once",
        target="qwen3",
        layers=2,
        aux=(0, 2, 3, 5),
        draft_vocab_size=160,
        head={
            **EAGLE3,
            **ARITHMETIC,
            "norm_output": True,
        },
    ),
    Layout(
        "eagle3, SmolLM2",
        SMOLLM2,
        aux=(2, 15, 27),
        draft_vocab_size=4096,
        own=False,
        steps=40,
        initialise="target",
        head=EAGLE3,
    ),
]


@dataclass(frozen=True)
class Spec:
    """One engine."""

    layout: Layout
    trained: bool
    k: int

    @property
    def name(self) -> str:
        return f"{self.layout.name}-{'trained' if self.trained else 'random'}-{self.k}"


SPECS = [Spec(layout, trained, k) for layout in LAYOUTS for trained in (False, True) for k in KS]


def in_short_run(spec: Spec) -> bool:
    """Whether `make test-vllm` has this engine: of each row one diagonal of weights x K, in turn."""
    return (LAYOUTS.index(spec.layout) + spec.trained + KS.index(spec.k)) % 2 == 0
