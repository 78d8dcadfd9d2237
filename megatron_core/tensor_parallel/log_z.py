"""Cross entropy together with log Z of the output's softmax, for the z-loss of the output layer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_core.ops import Backend
from megatron_core.parallel.groups import Group
from megatron_core.tensor_parallel.cross_entropy import VocabularyLoss


def cross_entropy_and_log_z(
    logits: Tensor,
    target: Tensor,
    *,
    tp_group: Group,
    vocab_size: int,
    backend: Backend = "auto",
    parts: int = 1,
) -> tuple[Tensor, Tensor]:
    """Logits ``[..., v/tp]`` and targets ``[...]`` -> losses and log Z = log sum_v exp(z_v), each ``[...]``.

    The arguments are those of ``vocab_parallel_cross_entropy``. Backward, once, overwrites the logits:
    dlogits = (g + h) softmax - g [target] for gradients g of losses and h of log Z.
    """
    losses, log_z = _CrossEntropyAndLogZ.apply(logits, target, (vocab_size, 0.0, tp_group, backend, parts))
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
        here = (target >= loss.first) & (target < loss.first + loss.valid)
        column = (target - loss.first).where(here, 0)
        grad.scatter_add_(-1, column[..., None], of_log_z.where(here, 0.0)[..., None].to(grad.dtype))
        return grad, None, None
