"""Our side: the step of `peagle train`, called as its loop calls it."""

from __future__ import annotations

import importlib.metadata
from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from peagle_train.head import matmul
from peagle_train.head.alignment import trainable_depths
from peagle_train.head.batch import Document, PackedBatch, pack
from peagle_train.head.config import HeadConfig
from peagle_train.head.initialise import initialise_randomly
from peagle_train.head.model import DrafterHead
from peagle_train.head.rope import Rope
from peagle_train.head.sampling import document_generator, sample_depths
from peagle_train.target.adapter import TargetOutput
from peagle_train.training.module import DraftTraining
from scripts.side_by_side.case import Case, Outcome, Shape
from scripts.side_by_side.floor import attention_rate, matmul_rate, operations


class Ours:
    """The head beside a made-up target's output layer."""

    def __init__(self, shape: Shape):
        self.shape = shape
        head = DrafterHead(head_config(shape))
        generator = torch.Generator().manual_seed(0)
        initialise_randomly(
            head, torch.randn(shape.vocab_size, shape.hidden_size, generator=generator), seed=0
        )
        head.set_draft_tokens(shape.draft_token_ids())
        head.lm_head.weight.requires_grad_(shape.train_output)
        rows = torch.randn(shape.draft_vocab_size, shape.hidden_size, generator=generator) * 0.02
        output = TargetOutput(nn.RMSNorm(shape.hidden_size, shape.rms_norm_eps), rows, None)
        self.module = DraftTraining(head, output, shape.positions, "kl").train()

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.module.head.named_parameters() if p.requires_grad}

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in ("peagle-train", "torch")}

    def step(self, case: Case, draw: int) -> Outcome:
        batch = self._batch(case, draw)
        sums = self.module(batch)
        loss = sums.loss / sums.count
        loss.backward()
        return Outcome(float(loss.detach()), batch.positions.shape[0], batch.num_supervised)

    def floor(self, case: Case, draw: int) -> dict[str, Any]:
        """The step's operations by term, and this machine's rates (operations per CPU-second)."""
        config = self.module.head.config
        return {
            **asdict(operations(config, self._batch(case, draw), train_output=self.shape.train_output)),
            "blas_rate": matmul_rate(torch.mm),
            "matmul_rate": matmul_rate(matmul.product),
            "attention_rate": attention_rate(config, case.token_ids.shape[0]),
        }

    def _batch(self, case: Case, draw: int) -> PackedBatch:
        generator = document_generator(seed=0, epoch=draw, row=0)
        trainable = trainable_depths(case.loss_mask)
        kept = sample_depths(trainable, self.shape.positions, self.shape.rate, generator=generator)
        return pack([Document(case.token_ids, case.aux, case.last, kept)])


def head_config(shape: Shape) -> HeadConfig:
    """Our head of that shape."""
    return HeadConfig(
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_layers=shape.num_layers,
        num_attention_heads=shape.num_attention_heads,
        num_key_value_heads=shape.num_key_value_heads,
        head_dim=shape.head_dim,
        vocab_size=shape.vocab_size,
        draft_vocab_size=shape.draft_vocab_size,
        target_hidden_size=shape.hidden_size,
        aux_layers=tuple(range(1, shape.aux_states + 1)),
        mask_token_id=shape.mask_token_id,
        rms_norm_eps=shape.rms_norm_eps,
        rope=Rope(shape.rope_theta),
        max_position_embeddings=1 << 20,
        own_embeddings=shape.train_embeddings,
    )


def build(shape: Shape) -> Ours:
    return Ours(shape)
