"""Entropy of distributions over a vocabulary that is split over tensor-parallel ranks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_core.ops.rows import wide
from megatron_core.parallel.collectives import start_gather_sequence
from megatron_core.parallel.groups import Group
from megatron_core.tensor_parallel.cross_entropy import VocabularyLoss

MAX_BYTES = 64 * 2**20
"""Bytes of wide logits at a time: more would be needed at once for several temporaries."""


def vocab_parallel_entropy(logits: Tensor, tp_group: Group, vocab_size: int) -> Tensor:
    """Logits ``[..., v/tp]`` -> entropy of their softmax in nats ``[...]``, float32 or wider.

    With p = softmax(z), H = log sum_v exp(z_v) - sum_v p_v z_v. Columns at or beyond ``vocab_size`` are padding.
    """
    columns = VocabularyLoss.of(logits.shape[-1], vocab_size, 0.0, tp_group, "auto")
    result: Tensor = _Entropy.apply(logits, tp_group, columns.valid)
    return result


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Group, valid: int) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        parts = torch.cat([_parts(piece, valid) for piece in _pieces(rows, valid)], dim=-1)
        gathered, handle = start_gather_sequence(parts[None], group)
        handle.wait()
        largest, exp_sum, mean = gathered.unbind(1)
        top = largest.amax(0)
        # Each rank's sums are relative to its own largest logit.
        factor = (largest - top).exp()
        total = (exp_sum * factor).sum(0)
        # The mean of z - top, which is exact where p is nearly 1 at one token.
        mean = ((mean + (largest - top) * exp_sum) * factor).where(exp_sum > 0, 0.0).sum(0) / total
        ctx.valid = valid
        ctx.save_for_backward(logits, top, total, mean)
        return (total.log() - mean).to(wide(logits.dtype)).view(logits.shape[:-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        """dH / dz_v = -p_v (z_v - sum_u p_u z_u)."""
        logits, top, total, mean = ctx.saved_tensors
        rows = logits.reshape(-1, logits.shape[-1])
        result = torch.zeros_like(rows)
        start = 0
        for piece in _pieces(rows, ctx.valid):
            part = slice(start, start + len(piece))
            centered = piece[:, : ctx.valid].double() - top[part, None]
            probs = centered.exp() / total[part, None]
            slope = -probs * (centered - mean[part, None]) * grad.reshape(-1)[part, None]
            result[part, : ctx.valid] = slope.to(result.dtype)
            start = part.stop
        return result.view_as(logits), None, None


def _pieces(rows: Tensor, valid: int) -> tuple[Tensor, ...]:
    """A few rows at a time, because they are converted to float64."""
    return rows.split(max(MAX_BYTES // (8 * max(valid, 1)), 1))


def _parts(rows: Tensor, valid: int) -> Tensor:
    """This rank's largest logit, sum of exponentials, and sum of exponentials times logits, relative to it: ``[3, n]``.

    In float64: H is a small difference of these where the distribution is peaked.
    """
    if not valid:
        none = rows.new_zeros(len(rows), dtype=torch.float64)
        return torch.stack([none - torch.inf, none, none])
    z = rows[:, :valid].double()
    largest = z.amax(1)
    z = z - largest[:, None]
    weights = z.exp()
    return torch.stack([largest, weights.sum(1), (weights * z).sum(1)])
