"""The mean over micro-batches of the means over their tokens."""

from collections.abc import Sequence

import torch
from torch import Tensor

from megatron_core.parallel.micro_batch import MicroBatch
from megatron_core.training.objective import LossReport, Objective, StepLoss


class MeanOfMeans(Objective):
    """Each micro-batch, or part of it on a context-parallel rank, has the same weight, whatever its masked tokens.

    Reports have the numbers of Megatron-LM's log: means over tokens, and means of means for evaluations with ``--sft``.
    """

    num_sums = 2

    def count_terms(self, batches: Sequence[MicroBatch]) -> Tensor:
        """Number of this rank's micro-batches, or of their tokens, a float64 scalar."""
        if not self._averages_means():
            return super().count_terms(batches)
        return torch.full((), len(batches), dtype=torch.float64, device=self.run.world.device)

    def step_loss(self, batches: Sequence[MicroBatch], report: LossReport | None = None) -> StepLoss:
        """As the base class, with the losses of a micro-batch divided by the number of its tokens."""
        plain = super().step_loss(batches, report)
        if not self._averages_means():
            return plain
        tokens = [batch.loss_mask.sum(dtype=torch.float64) for batch in batches]

        def sum_losses(micro: int, output: Tensor) -> Tensor:
            total = plain.sum_losses(micro, output)
            if report is not None:
                report.add_terms(torch.stack([total.detach().double(), tokens[micro]]))
            # At least 1, as in Megatron Core, for a micro-batch whose tokens are all masked.
            return total / tokens[micro].clamp(min=1).to(total.dtype)

        return StepLoss(sum_losses)

    def metrics(self, sums: Sequence[float]) -> dict[str, float]:
        """The mean over the tokens of the global batch, as the loss of the step in reports."""
        losses, tokens = sums
        return {"lm loss": losses / max(tokens, 1.0)}

    def _averages_means(self) -> bool:
        """Whether the loss is a mean of means: Megatron-LM evaluates the mean over tokens, except with ``--sft``."""
        is_training = all(stage.training for stage in self.run.stages.values())
        return is_training or bool(self.run.config.optional("sft"))
