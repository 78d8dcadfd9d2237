"""Cross entropy of a part of a vocabulary."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_core.ops.rows import wide


def cross_entropy_parts(logits: Tensor, target: Tensor, first: int, valid: int) -> Tensor:
    """``[4, ...]``: m = max(z), sum(exp(z - m)), the target's z (0 where it is elsewhere), sum(z); z the first
    ``valid`` columns of ``logits`` ``[..., v]``, which are the tokens from ``first`` on."""
    z = logits.to(wide(logits.dtype), copy=True)
    z[..., valid:] = -torch.inf
    maximum = z.amax(-1)
    here, label = _label(target, first, valid)
    z_target = z.gather(-1, label).squeeze(-1).masked_fill(~here, 0.0)
    z_sum = z[..., :valid].sum(-1)
    z -= maximum.masked_fill(maximum == -torch.inf, 0.0).unsqueeze(-1)  # an infinity less itself would be NaN
    return torch.stack([maximum, z.exp_().sum(-1), z_target, z_sum])


def cross_entropy_backward(
    dloss: Tensor,
    logits: Tensor,
    target: Tensor,
    statistics: Tensor,
    first: int,
    valid: int,
    kept: float,
    spread: float,
    overwrite: bool,
) -> Tensor:
    """dloss * (exp(z - m) / s - kept [target] - spread), 0 in the padding; ``statistics`` ``[2, ...]`` are m and s
    over the whole vocabulary. With ``overwrite`` it takes the place of the logits."""
    maximum, exp_sum = statistics.unsqueeze(-1)
    dloss = dloss.unsqueeze(-1)
    grad = logits if overwrite and logits.dtype == wide(logits.dtype) else logits.to(wide(logits.dtype), copy=True)
    grad.sub_(maximum).exp_().mul_(dloss / exp_sum).sub_(spread * dloss)
    here, label = _label(target, first, valid)
    grad.scatter_add_(-1, label, -kept * dloss * here.unsqueeze(-1))
    grad[..., valid:] = 0.0
    return logits.copy_(grad) if overwrite else grad.to(logits.dtype)


def _label(target: Tensor, first: int, valid: int) -> tuple[Tensor, Tensor]:
    """Whether each target is a valid column here, and which ``[..., 1]``; 0 where it is not."""
    here = (target >= first) & (target < first + valid)
    return here, (target - first).masked_fill(~here, 0).unsqueeze(-1)
