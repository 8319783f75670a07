"""Head and target output as one module: a batch goes in, sums over its elements come out.

One forward call per micro-batch, so that wrappers (DDP, DeepSpeed) see what they expect.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from peagle_train.head.batch import PackedBatch
from peagle_train.head.loss import LossKind, LossSums, draft_loss
from peagle_train.head.model import DrafterHead


class DraftTraining(nn.Module):
    """The trained head beside the frozen output layer of its target.

    Args:
        head: what is trained.
        target_output: maps the target's last states [P, TH] to its logits over the draft vocabulary
            [P, DV]; never trained.
        positions: K.
        loss: "kl" or "ce".
    """

    def __init__(self, head: DrafterHead, target_output: nn.Module, positions: int, loss: LossKind):
        super().__init__()
        self.head = head
        # Kept out of the module tree: it is neither trained, saved nor wrapped.
        self._target_output = (target_output.requires_grad_(False),)
        self.positions, self.loss = positions, loss
        self.register_buffer("draft_token_ids", head.draft_token_ids, persistent=False)
        self.draft_token_ids: Tensor

    def move_target_output(self, device: torch.device) -> None:
        """Takes the frozen output layer to the device where the batches will be."""
        self._target_output[0].to(device)

    def forward(self, batch: PackedBatch) -> LossSums:
        if batch.num_supervised == 0:
            # Every parameter takes part, so that whoever adds gradients up over processes gets one of each.
            trained = [p for p in self.head.parameters() if p.requires_grad]
            loss = torch.stack([(p * 0).sum() for p in trained]).sum()
            zeros = torch.zeros(self.positions, device=loss.device)
            return LossSums(loss, torch.zeros((), dtype=torch.int64, device=loss.device), zeros, zeros)
        with torch.no_grad():
            target_logits = self._target_output[0](batch.last)
        return draft_loss(
            self.head.logits(self.head(batch)),
            target_logits,
            batch.output_row,
            batch.labels,
            self.draft_token_ids,
            batch.depth[batch.supervised],
            self.positions,
            self.loss,
        )
