"""The z-loss of the output layer: cross entropy together with log Z of the output's softmax."""

from typing import Any

import torch
from torch import Tensor

from megatron_core.features.output_losses.settings import Z_LOSS, OutputLossConfig
from megatron_core.ops import Backend
from megatron_core.parallel.groups import Group
from megatron_core.tensor_parallel import ModelParallelConfig
from megatron_core.tensor_parallel.cross_entropy import VocabularyLoss
from megatron_core.transformer.context import SequenceContext


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
