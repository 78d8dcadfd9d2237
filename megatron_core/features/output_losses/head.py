"""The head of the vocabulary with other losses."""

from torch import Tensor, nn

from megatron_core.features.output_losses.chunked_loss import linear_cross_entropy
from megatron_core.features.output_losses.settings import OutputLossConfig
from megatron_core.features.output_losses.z_loss import cross_entropy_and_log_z, with_z_loss
from megatron_core.models.gpt.model import LogitLoss, VocabularyHead
from megatron_core.transformer.context import SequenceContext


class LossHead(VocabularyHead):
    """Computes losses without storing all logits, or adds the z-loss to the model's own loss in training."""

    def losses(
        self,
        hidden: Tensor,
        target: Tensor,
        weight: nn.Parameter | None,
        logit_loss: LogitLoss | None = None,
        context: SequenceContext | None = None,
        loss_mask: Tensor | None = None,
    ) -> Tensor:
        """See ``VocabularyHead.losses``."""
        settings = self.model_config.section(OutputLossConfig)
        in_chunks = getattr(logit_loss, "in_chunks", None)
        # Complete logits are the largest tensor of many models; chunks of them are enough for cross entropy and its
        # gradient.
        if settings.fuses_output_layer_with_loss and (logit_loss is None or in_chunks):
            weight = self.weight if weight is None else weight
            assert weight is not None, "an output layer without a weight of its own is tied"
            inputs = self._scaled(hidden), weight, target, self.comm
            if in_chunks is not None:
                losses: Tensor = in_chunks(*inputs)
                return losses
            return linear_cross_entropy(*inputs, vocab_size=self.vocab_size, backend=settings.kernel_backend)
        if not settings.output_z_loss_coeff or logit_loss or context is None or context.auxiliary_losses is None:
            return super().losses(hidden, target, weight, logit_loss)
        losses, log_z = cross_entropy_and_log_z(self.logits(hidden, weight), target, **self.vocabulary)
        return with_z_loss(settings, loss_mask, context, self.config, losses, log_z)
