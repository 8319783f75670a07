"""Head and target output as one module: a batch goes in, sums over its elements come out.

One forward call per micro-batch, so that wrappers (DDP, DeepSpeed, FSDP) see what they expect. It computes
loss and gradients (`head/engine.py`); the backward of the loss only hands the gradients out.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peagle_train.head.batch import PackedBatch
from peagle_train.head.engine import EngineSettings, deliver, loss_and_gradients, trained_parameters
from peagle_train.head.loss import LossKind, LossSums, total_weight
from peagle_train.head.model import DrafterHead


class DraftTraining(nn.Module):
    """The trained head beside the frozen output layer of its target.

    Args:
        head: what is trained.
        target_output: maps the target's last states [P, TH] to its logits over the draft vocabulary
            [P, DV]; never trained.
        positions: K.
        loss: "kl" or "ce".
        weights: [K] weight of an element by depth; None: all equal.
        engine: how a batch is cut.
    """

    def __init__(
        self,
        head: DrafterHead,
        target_output: nn.Module,
        positions: int,
        loss: LossKind,
        weights: Tensor | None = None,
        engine: EngineSettings | None = None,
    ):
        super().__init__()
        self.head = head
        # Kept out of the module tree: it is neither trained, saved nor wrapped.
        self._target_output = (target_output.requires_grad_(False),)
        self.positions, self.loss = positions, loss
        self.weights = torch.ones(positions) if weights is None else weights
        self.engine = engine or EngineSettings()

    def move_target_output(self, device: torch.device) -> None:
        """Takes the frozen output layer to the device where the batches will be."""
        self._target_output[0].to(device)

    @property
    def output_bytes(self) -> int:
        """Bytes of the frozen output layer."""
        tensors = self._target_output[0].state_dict().values()
        return sum(t.numel() * t.element_size() for t in tensors)

    def weight_of(self, batch: PackedBatch | None) -> Tensor:
        """[] what a step divides its loss by, summed over all its batches; known before the forward."""
        if batch is None:
            return torch.zeros((), device=self.head.lm_head.weight.device)
        ids = self.head.draft_token_ids.to(batch.labels.device)
        return total_weight(batch, ids, self.loss, self.weights)

    def forward(self, batch: PackedBatch | None) -> LossSums:
        """The sums of a batch; None, a batch of nothing, has sums and gradients of zero."""
        parameters = trained_parameters(self.head)
        if batch is None:
            zeros = torch.zeros(self.positions, device=parameters[0].device)
            nothing = deliver(zeros.sum(), parameters, [None] * len(parameters))
            return LossSums(nothing, zeros.sum(), zeros, zeros.clone())
        sums, gradients = loss_and_gradients(
            self.head,
            self._target_output[0],
            batch,
            kind=self.loss,
            weights=self.weights,
            settings=self.engine,
            gradients=torch.is_grad_enabled(),
        )
        if torch.is_grad_enabled():
            sums.loss = deliver(sums.loss, parameters, gradients)
        return sums
