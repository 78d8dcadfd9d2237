"""Cross entropy of logits that are split over the vocabulary, without gathering them.

loss = log sum_v exp(z_v) - z_target. Source: Shoeybi et al. 2019, section 3 (fused parallel cross entropy).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_core import parallel_state
from megatron_core.errors import LayoutError
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import Group


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: Group | None = None,
    *,
    vocab_size: int | None = None,
    overwrite_logits: bool = False,
) -> Tensor:
    """Logits ``[..., v/tp]`` and targets ``[...]`` (global ids) -> losses ``[...]``, float32 or wider.

    Columns at or beyond ``vocab_size`` are padding and take no part in the softmax. With ``label_smoothing`` e the
    target distribution is (1 - e) at the target plus e / V everywhere (Szegedy et al. 2016, section 7).
    ``overwrite_logits`` lets the softmax take the place of the logits, the largest tensor of a model: for callers who
    do not read them again.
    """
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise LayoutError(
            f"logits {list(vocab_parallel_logits.shape)} and target {list(target.shape)} do not fit; logits are [s, b, "
            "v/tp], targets [s, b] and whole on every rank (with sequence parallel the output layer gathers them)"
        )
    group = tp_group if tp_group is not None else parallel_state.get_tensor_model_parallel_group()
    total = vocab_parallel_logits.shape[-1] * group.size() if vocab_size is None else vocab_size
    return _VocabParallelCrossEntropy.apply(
        vocab_parallel_logits, target, label_smoothing, group, total, overwrite_logits
    )


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, smoothing, group, total, overwrite):
        columns = logits.shape[-1]
        start = group.rank() * columns
        valid = min(max(total - start, 0), columns)
        z = logits.detach().to(torch.promote_types(logits.dtype, torch.float32))
        if z.dtype == logits.dtype and not overwrite:
            z = z.clone()
        z[..., valid:] = -torch.inf  # padding: weight 0 in the softmax, and with it gradient 0
        z.sub_(_global_max(z, group).unsqueeze(-1))

        here = (target >= start) & (target < start + valid)
        local_target = (target - start).masked_fill(~here, 0)
        z_target = z.gather(-1, local_target.unsqueeze(-1)).squeeze(-1).masked_fill(~here, 0.0)
        z_sum = z[..., :valid].sum(-1) if smoothing else torch.zeros_like(z_target)
        softmax = z.exp_()
        sums = torch.stack([softmax.sum(-1), z_target, z_sum])
        all_reduce_(sums, group)
        exp_sum, z_target, z_sum = sums
        softmax.div_(exp_sum.unsqueeze(-1))

        ctx.save_for_backward(softmax, local_target, here)
        ctx.smoothing, ctx.total, ctx.valid, ctx.dtype = smoothing, total, valid, logits.dtype
        return exp_sum.log() - (1.0 - smoothing) * z_target - (smoothing / total) * z_sum

    @staticmethod
    def backward(ctx, grad_loss):
        softmax, local_target, here = ctx.saved_tensors
        # In place: a second backward through the same graph is an error of autograd, never a wrong gradient.
        grad = softmax.mul_(grad_loss.unsqueeze(-1))
        at_target = -(1.0 - ctx.smoothing) * grad_loss * here
        grad.scatter_add_(-1, local_target.unsqueeze(-1), at_target.unsqueeze(-1).to(grad.dtype))
        if ctx.smoothing:
            grad[..., : ctx.valid] -= (ctx.smoothing / ctx.total) * grad_loss.unsqueeze(-1)
        return grad.to(ctx.dtype), None, None, None, None, None


def _global_max(z: Tensor, group: Group) -> Tensor:
    """The largest logit over all ranks."""
    largest = z.amax(-1)
    all_reduce_(largest, group, maximum=True)
    return largest
