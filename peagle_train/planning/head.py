"""The head of a recipe without its weights."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from peagle_train.head.engine import trained_parameters
from peagle_train.head.model import DrafterHead
from peagle_train.recipe.head import head_config
from peagle_train.recipe.schema import Recipe
from peagle_train.target.facts import TargetFacts
from peagle_train.training.memory import weights_bytes


@dataclass(frozen=True)
class HeadPlan:
    """A head on torch's meta device: shapes, and no memory.

    total: parameters, the embedding table among them, whether it is trained or the target's.
    trained: those that have gradients.
    exported: bytes of the directory that vLLM loads.
    """

    head: DrafterHead
    total: int
    trained: int
    exported: int

    @property
    def weights(self) -> int:
        """Bytes of the head while it is trained, in float32."""
        return weights_bytes(self.head)


def head_of(recipe: Recipe, facts: TargetFacts) -> HeadPlan:
    """The head that a recipe describes. Raises ValueError for sizes or a RoPE that no head has."""
    section = recipe.head
    # Which id the mask token has changes no size.
    mask = 0 if recipe.method == "peagle" else None
    config = head_config(recipe, facts, mask, section.draft_vocab_size or facts.vocab_size)
    with torch.device("meta"):
        head = DrafterHead(config)
    head.lm_head.weight.requires_grad_(section.output == "trained")
    table = head.embed_tokens.weight.numel()
    total = sum(p.numel() for p in head.parameters())
    exported = total if config.own_embeddings else total - table
    width = getattr(torch, recipe.export.dtype).itemsize
    return HeadPlan(head, total, sum(p.numel() for p in trained_parameters(head)), exported * width)
