"""The sum of squares, a factor, and AdamW, for lists of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.optim.adamw import adamw

from megatron_core.ops.rows import wide


def squared_norm(tensors: Sequence[Tensor]) -> Tensor:
    """Sum of x^2 over all elements of all tensors: float64, of norms that PyTorch sums up in float32 or wider."""
    # On CPUs PyTorch takes ten times as long to sum float32 numbers in float64.
    norms = [torch.linalg.vector_norm(x, dtype=wide(x.dtype)).double() for x in tensors]
    return torch.stack(norms).square().sum()


def scale_(tensors: Sequence[Tensor], factor: float) -> None:
    """x = factor * x, in place."""
    for x in tensors:
        x.mul_(factor)


def adamw_(
    grads: Sequence[Tensor],
    weights: Sequence[Tensor],
    exp_avgs: Sequence[Tensor],
    exp_avg_sqs: Sequence[Tensor],
    copies: Sequence[Tensor],
    *,
    step: int,
    factor: float,
    **rates: float,
) -> None:
    """torch.optim.AdamW's fused step, after a factor on the gradients and before the copies; ``rates`` by its names."""
    grads = [grad.to(weight.dtype) for grad, weight in zip(grads, weights, strict=True)]
    if factor != 1.0:
        scale_(grads, factor)
    steps_before = [torch.full((), step - 1.0, device=weight.device) for weight in weights]
    state = (grads, list(exp_avgs), list(exp_avg_sqs), [], steps_before)
    adamw(list(weights), *state, fused=True, amsgrad=False, maximize=False, **rates)
    for copy, weight in zip(copies, weights, strict=False):
        copy.copy_(weight)
