"""The peer's side: speculators 0.9.0 builds its P-EAGLE head and its optimizer by its own code.

Named by the job, so that the heads can be compared: target, tapped layers, number of layers, draft
vocabulary, mask token, K. Forced by the CPU: attention sdpa, loss eager, float32. Full attention instead of
its window of 2,048, which no row here reaches. All else is its default: qwen3 layers with random weights,
the target's embeddings (trained, unless the job freezes them) and output rows (frozen), COD with r = 0.7 and
a floor of 0.2, KL.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from speculators.models.peagle import PEagleDraftModel
from speculators.models.peagle.data import generate_cod_sample_indices
from speculators.train.cli import build_draft_model
from speculators.train.config.schema import TrainConfig
from speculators.train.optimizers import build_optimizers
from torch import nn
from transformers import AutoConfig

from peagle_train.files import atomic_file
from peagle_train.store.states import StateStore
from peagle_train.training.data import Draw
from scripts.compare_peer.learn import Job
from scripts.side_by_side.case import Case
from scripts.side_by_side.peer import collated

HEAD = "head"
PROBE = "probe.safetensors"


class Peer:
    """Its model and the arguments its trainer would call it with."""

    def __init__(self, job: Job, store: StateStore):
        self.job, self.store = job, store
        config = TrainConfig(
            speculator_type="peagle",
            seed=job.seed,
            verifier={"verifier_name_or_path": job.target},
            draft={
                "num_layers": job.layers,
                "target_layer_ids": job.aux_layers,
                "mask_token_id": job.mask_token_id,
                "draft_attn_impl": "sdpa",
                "full_attention_indices": list(range(job.layers)),
            },
            loss={"loss_implementation": "eager"},
            optimizer={"optimizer": job.optimizer, "lr": job.rate},
            peagle={"num_depths": job.positions},
        )
        self.settings = argparse.Namespace(**config.flatten())
        draft_ids = load_file(job.vocabulary)["token_ids"]
        in_draft = torch.zeros(AutoConfig.from_pretrained(job.target).vocab_size, dtype=torch.bool)
        in_draft[draft_ids] = True
        offsets = draft_ids - torch.arange(draft_ids.shape[0])
        self.model = build_draft_model(
            self.settings, PEagleDraftModel, in_draft, offsets, draft_ids.shape[0]
        ).train()
        self.model.embed_tokens.weight.requires_grad_(job.embeddings == "trained")
        self.arguments = PEagleDraftModel.get_trainer_kwargs(**vars(self.settings))[0]

    def trained(self) -> list[nn.Parameter]:
        return [p for p in self.model.parameters() if p.requires_grad]

    def optimizers(self) -> list[torch.optim.Optimizer]:
        return build_optimizers(self.model, self.settings)

    def step(self, draws: Sequence[Draw]) -> float:
        _, loss, _ = self.model(**collated([self._case(d.row) for d in draws]), **self.arguments)
        loss.backward()
        return float(loss.detach())

    def save(self, directory: Path) -> None:
        self.model.save_pretrained(directory / HEAD)
        with atomic_file(directory / PROBE) as temporary:
            save_file(self._probe(), temporary)

    def _case(self, row: int) -> Case:
        """A row without its last token: a target's state after that one is not stored, nothing follows it.

        Zeros stand for the states that are not stored. Its loss reads none of them: the last generated token
        of a turn that others follow would need one, so that one is not supervised.
        """
        stored = self.store.read(row)
        assert stored.last_at is not None
        n = stored.token_ids.shape[0] - 1
        aux, last = torch.zeros(n, stored.aux.shape[1]), torch.zeros(n, stored.last.shape[1])
        aux[: len(stored.aux)] = stored.aux.float()
        last[stored.last_at] = stored.last.float()
        mask = torch.zeros(n, dtype=torch.bool)
        mask[stored.last_at] = True
        return Case(stored.token_ids[:-1], mask, aux, last)

    @torch.no_grad()
    def _probe(self) -> dict[str, torch.Tensor]:
        """Logits [N, DV] of the probe row's elements, with their anchor and depth [N]."""
        inputs = collated([self._case(self.job.probe)])
        everything = {"max_anchors": None, "down_sample_ratio": 1.0, "down_sample_ratio_min": 1.0}
        logits: list[torch.Tensor] = []
        hook = self.model.lm_head.register_forward_hook(lambda *call: logits.append(call[2][0]))
        torch.manual_seed(0)
        self.model.eval()(**inputs, **{**self.arguments, **everything})
        hook.remove()
        torch.manual_seed(0)  # the same draw once more
        anchor, depth = generate_cod_sample_indices(
            inputs["input_ids"].shape[1], inputs["loss_mask"], self.job.positions, **everything
        )
        return {"logits": logits[0].contiguous(), "anchor": anchor, "depth": depth}


def build(job: Job, store: StateStore) -> Peer:
    return Peer(job, store)
