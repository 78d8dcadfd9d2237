"""The head of the vocabulary with other losses."""

from functools import partial

import torch
from torch import Tensor, nn

from megatron_core.features.output_losses.chunked_loss import linear_cross_entropy
from megatron_core.features.output_losses.settings import OutputLossConfig
from megatron_core.features.output_losses.z_loss import cross_entropy_and_log_z, with_z_loss
from megatron_core.models.gpt.model import LogitLoss, VocabularyHead
from megatron_core.ops import linear
from megatron_core.tensor_parallel.linear import LinearGradients, MatrixProducts, parallel_linear
from megatron_core.tensor_parallel.linear_comm import LinearComm, gather_input
from megatron_core.transformer.context import LayerContext, SequenceContext


class Float32Logits(MatrixProducts):
    """Logits in float32 of 16-bit inputs and weights; backward rounds their gradient to 16 bits (Megatron Core)."""

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, comm: LinearComm, *, training: bool
    ) -> tuple[Tensor, Tensor, None]:
        """See ``MatrixProducts.output``."""
        gathered = gather_input(x, comm)
        if gathered.is_cuda:
            rows = gathered.flatten(0, -2)
            logits = torch.mm(rows, weight.t(), out_dtype=torch.float32).view(*gathered.shape[:-1], -1)
        else:
            logits = linear(gathered.float(), weight.float())
        return logits if bias is None else logits + bias, x, None

    def gradients(self, weight: nn.Parameter, grad_y: Tensor, saved: None) -> LinearGradients:
        """See ``MatrixProducts.gradients``."""
        return LinearGradients(weight, grad_y.to(weight.dtype))


class LossHead(VocabularyHead):
    """Computes losses without storing all logits, adds the z-loss to the model's own loss in training, or computes
    logits in float32."""

    def __init__(self, context: LayerContext, vocab_size: int, *, tied: bool) -> None:
        super().__init__(context, vocab_size, tied=tied)
        is_narrow = context.parallel.params_dtype.itemsize < torch.float32.itemsize
        if is_narrow and self.model_config.section(OutputLossConfig).output_logit_dtype == "fp32":
            self.product = partial(parallel_linear, products=Float32Logits())

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
                return in_chunks(*inputs)
            return linear_cross_entropy(*inputs, vocab_size=self.vocab_size, backend=settings.kernel_backend)
        if not settings.output_z_loss_coeff or logit_loss or context is None or context.auxiliary_losses is None:
            return super().losses(hidden, target, weight, logit_loss)
        losses, log_z = cross_entropy_and_log_z(self.logits(hidden, weight), target, **self.vocabulary)
        return with_z_loss(settings, loss_mask, context, self.config, losses, log_z)
