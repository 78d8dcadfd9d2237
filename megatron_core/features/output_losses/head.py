"""The head of the vocabulary with other losses."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.features.output_losses.chunked_loss import linear_cross_entropy
from megatron_core.features.output_losses.settings import Z_LOSS, OutputLossConfig
from megatron_core.models.gpt.model import LogitLoss, VocabularyHead
from megatron_core.ops import Backend, linear
from megatron_core.parallel.groups import Group
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.tensor_parallel.cross_entropy import VocabularyLoss
from megatron_core.tensor_parallel.linear import LinearGradients, MatrixProducts, parallel_linear
from megatron_core.tensor_parallel.linear_comm import LinearComm, gather_input
from megatron_core.transformer.context import LayerContext, SequenceContext


def with_z_loss(
    config: OutputLossConfig,
    loss_mask: Tensor | None,
    context: SequenceContext,
    parallel: ModelParallelConfig,
    losses: Tensor,
    log_z: Tensor,
) -> Tensor:
    """Return ``losses`` ``[s, b]`` with the gradient of c log^2 Z attached, for c = ``output_z_loss_coeff``.

    Z is the sum of the exponentials of a token's logits; the mean is over the unmasked tokens of the global batch
    (``loss_mask`` ``[b, s]``). Source: Chowdhery et al. 2022 (PaLM), section 5.
    """
    squares = log_z.square() if loss_mask is None else log_z.square() * loss_mask.transpose(0, 1)
    return context.add_auxiliary_loss(
        losses,
        Z_LOSS,
        parallel.arithmetic.loss_sum(squares),
        layer_number=config.num_layers,
        coefficient=config.output_z_loss_coeff,
    )


def cross_entropy_and_log_z(
    logits: Tensor,
    target: Tensor,
    *,
    tp_group: Group,
    vocab_size: int,
    backend: Backend = "auto",
    num_parts: int = 1,
) -> tuple[Tensor, Tensor]:
    """Logits ``[..., v/tp]`` and targets ``[...]`` -> losses and log Z = log sum_v exp(z_v), each ``[...]``.

    The arguments are those of ``vocab_parallel_cross_entropy``. Backward, once, overwrites the logits:
    dlogits = (g + h) softmax - g [target] for gradients g of losses and h of log Z.
    """
    losses, log_z = _CrossEntropyAndLogZ.apply(logits, target, (vocab_size, 0.0, tp_group, backend, num_parts))
    return losses, log_z


class _CrossEntropyAndLogZ(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, target: Tensor, vocabulary: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
        loss = VocabularyLoss.of(logits.shape[-1], *vocabulary)
        losses, statistics = loss.joined(loss.parts(logits, target))
        ctx.loss = loss
        ctx.save_for_backward(logits, target, statistics)
        return losses, statistics[0] + statistics[1].log()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, of_losses: Tensor, of_log_z: Tensor) -> tuple[Tensor, None, None]:
        logits, target, statistics = ctx.saved_tensors
        loss: VocabularyLoss = ctx.loss
        # The kernel subtracts the gradient of both at the target; that of log Z is added again.
        grad = loss.gradient(of_losses + of_log_z, logits, target, statistics, overwrite=True).detach()
        is_local = (target >= loss.first) & (target < loss.first + loss.valid)
        column = (target - loss.first).where(is_local, 0)
        grad.scatter_add_(-1, column[..., None], of_log_z.where(is_local, 0.0)[..., None].to(grad.dtype))
        return grad, None, None


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
