"""The peer's side: PEagleDraftModel of speculators 0.9.0, called as its trainer calls it, on a CPU.

Its defaults are a GPU's. Here: attention sdpa (flex attention has no backward on a CPU), loss eager (the
fused one is Triton), no cap on anchors, no sliding window, no floor under COD's rate; KL is its default. The
trainer itself asks for a GPU; its loop (train/trainer.py, train_epoch) is a forward, a backward, clipping and
the optimizer.

Left as it is: rows are x[i+1] beside h[i] for all i of the document (`shift_batch`); what carries loss is
every row whose position is a generated token, the answer's first one included, whatever its anchor is.
"""

from __future__ import annotations

import importlib.metadata
from typing import Any

import torch
from speculators.config import SpeculatorsConfig, VerifierConfig
from speculators.models.eagle3.data import shift_batch
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig
from speculators.proposals.greedy import GreedyTokenProposalConfig
from torch import Tensor, nn
from transformers import LlamaConfig

from scripts.side_by_side.case import Case, Outcome, Shape


class Peer:
    """Its model, with the random weights that ours has."""

    def __init__(self, shape: Shape):
        self.shape = shape
        self.model = PEagleDraftModel(_config(shape)).train()
        draft_ids = shape.draft_token_ids()
        in_draft = torch.zeros(shape.vocab_size, dtype=torch.bool)
        in_draft[draft_ids] = True
        self.model.load_vocab_mappings(in_draft, draft_ids - torch.arange(shape.draft_vocab_size))
        with torch.no_grad():  # these wait for a verifier's weights and hold NaN
            for table in (self.model.embed_tokens, self.model.lm_head, self.model.verifier_lm_head):
                table.weight.normal_(std=0.02)
        # It trains the embeddings and freezes the output rows; here both sides do what the shape says.
        self.model.embed_tokens.weight.requires_grad_(shape.train_embeddings)
        self.model.lm_head.weight.requires_grad_(shape.train_output)
        self.arguments = PEagleDraftModel.get_trainer_kwargs(
            loss_fn="kl_div",
            loss_implementation="eager",
            max_anchors=None,
            num_depths=shape.positions,
            down_sample_ratio=shape.rate,
            down_sample_ratio_min=0.0,
        )[0]

    def trained(self) -> dict[str, nn.Parameter]:
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    def versions(self) -> dict[str, str]:
        return {name: importlib.metadata.version(name) for name in ("speculators", "transformers", "torch")}

    def step(self, case: Case, draw: int) -> Outcome:
        torch.manual_seed(draw)
        inputs = collated([case])
        _, loss, metrics = self.model(**inputs, **self.arguments)
        loss.backward()
        elements = [int(metrics[f"position_{d}_acc_total"]) for d in range(self.shape.positions)]
        # All positions are rows at depth 0; deeper rows exist only where there is loss.
        rows = inputs["input_ids"].shape[1] + sum(elements[1:])
        return Outcome(float(loss.detach()), rows, sum(elements))

    def floor(self, case: Case, draw: int) -> dict[str, Any]:
        raise NotImplementedError("the floor is counted for what we compute")


def collated(cases: list[Case]) -> dict[str, Tensor]:
    """The documents as its collate function leaves them, without the padding that it would add."""
    shifted = [
        shift_batch(
            {
                "input_ids": case.token_ids,
                "hidden_states": case.aux,
                "verifier_last_hidden_states": case.last,
                "loss_mask": case.loss_mask,
                "lengths": torch.tensor([case.token_ids.shape[0]]),
                "position_ids": torch.arange(case.token_ids.shape[0]),
            }
        )
        for case in cases
    ]
    lengths = torch.cat([row.pop("lengths") for row in shifted])
    inputs = {name: torch.cat([row[name] for row in shifted])[None] for name in shifted[0]}
    documents = torch.arange(len(cases)).repeat_interleave(lengths)
    return {**inputs, "document_ids": documents[None]}


def _config(shape: Shape) -> PEagleSpeculatorConfig:
    return PEagleSpeculatorConfig(
        transformer_layer_config=LlamaConfig(
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            num_hidden_layers=shape.num_layers,
            num_attention_heads=shape.num_attention_heads,
            num_key_value_heads=shape.num_key_value_heads,
            head_dim=shape.head_dim,
            vocab_size=shape.vocab_size,
            rms_norm_eps=shape.rms_norm_eps,
            rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
            max_position_embeddings=1 << 20,
            tie_word_embeddings=False,
            attn_implementation="sdpa",
        ),
        draft_vocab_size=shape.draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=list(range(1, shape.aux_states + 1)),
        mask_token_id=shape.mask_token_id,
        embed_requires_grad=shape.train_embeddings,
        speculators_config=SpeculatorsConfig(
            algorithm="peagle",
            proposal_methods=[GreedyTokenProposalConfig(speculative_tokens=shape.positions)],
            default_proposal_method="greedy",
            verifier=VerifierConfig(name_or_path=None, architectures=[]),
        ),
    )


def build(shape: Shape) -> Peer:
    return Peer(shape)
