"""The mean over micro-batches of the means over their tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.training.objective import LossReport, Objective, StepLoss


class MeanOfMeans(Objective):
    """Each micro-batch, or part of it on a context-parallel rank, has the same weight, whatever its masked tokens."""

    def count_terms(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Number of this rank's micro-batches, a float64 scalar."""
        return torch.full((), len(batches), dtype=torch.float64, device=self.run.world.device)

    def step_loss(self, batches: Sequence[MicroBatch], report: LossReport | None = None) -> StepLoss:
        """As the base class, with the losses of a micro-batch divided by the number of its tokens."""
        plain = super().step_loss(batches, report)
        # At least 1, as in Megatron Core, for a micro-batch whose tokens are all masked.
        counts = [batch.loss_mask.sum().clamp(min=1) for batch in batches]
        return StepLoss(lambda micro, output: plain.sum_losses(micro, output) / counts[micro])
