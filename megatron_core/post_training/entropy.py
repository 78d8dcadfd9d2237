"""Entropy of distributions over a vocabulary that is split over tensor-parallel ranks."""

from dataclasses import dataclass
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
    return _Entropy.apply(logits, tp_group, columns.valid)


class _Entropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, group: Group, valid: int) -> Tensor:
        rows = logits.reshape(-1, logits.shape[-1])
        top, total, mean = _joined(_parts(rows, valid), group)
        ctx.valid = valid
        ctx.save_for_backward(logits, top, total, mean)
        return (total.log() - mean).to(wide(logits.dtype)).view(logits.shape[:-1])

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        logits, top, total, mean = ctx.saved_tensors
        rows = logits.reshape(-1, logits.shape[-1])
        slopes = _slopes(rows, ctx.valid, torch.stack([top, total, mean]), grad.reshape(-1))
        return slopes.view_as(logits), None, None


@dataclass(frozen=True)
class TemperedLoss(VocabularyLoss):
    """For chunks of logits: -log softmax(z / temperature) at the target ``[n]``, or with the entropy ``[n, 2]``."""

    temperature: float = 1.0
    with_entropy: bool = False
    dtype: torch.dtype = torch.float32
    """Dtype of both."""

    def parts(self, logits: Tensor, target: Tensor) -> Tensor:
        """See ``VocabularyLoss.parts``; with the three parts of the entropy ``[1, 7, n]``."""
        logits = logits / self.temperature
        statistics = super().parts(logits, target)
        if not self.with_entropy:
            return statistics
        return torch.cat([statistics, _parts(logits, self.valid)[None]], dim=1)

    def joined(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """See ``VocabularyLoss.joined``."""
        if not self.with_entropy:
            return super().joined(statistics)
        losses, of_losses = super().joined(statistics[:, :4].to(self.dtype))
        of_entropy = torch.stack(_joined(statistics[0, 4:], self.group))
        entropy = (of_entropy[1].log() - of_entropy[2]).to(self.dtype)
        return torch.stack([losses, entropy], -1), torch.cat([of_losses, of_entropy])

    def gradient(
        self, grad_losses: Tensor, logits: Tensor, target: Tensor, statistics: Tensor, *, overwrite: bool
    ) -> Tensor:
        """See ``VocabularyLoss.gradient``."""
        logits = logits / self.temperature
        slopes = None
        if self.with_entropy:
            slopes = _slopes(logits, self.valid, statistics[2:], grad_losses[..., 1])
            grad_losses = grad_losses[..., 0].contiguous()
            statistics = statistics[:2].to(self.dtype)
        gradient = super().gradient(grad_losses, logits, target, statistics, overwrite=overwrite)
        return (gradient if slopes is None else gradient.add_(slopes)).div_(self.temperature)


def _joined(statistics: Tensor, group: Group) -> tuple[Tensor, Tensor, Tensor]:
    """From ``[3, n]``: the largest logit of all ranks; relative to it, the sum of exponentials and the mean logit."""
    gathered, handle = start_gather_sequence(statistics[None], group)
    handle.wait()
    largest, exp_sum, mean = gathered.unbind(1)
    top = largest.amax(0)
    # Each rank's sums are relative to its own largest logit.
    factor = (largest - top).exp()
    total = (exp_sum * factor).sum(0)
    # The mean of z - top, which is exact where p is nearly 1 at one token.
    mean = ((mean + (largest - top) * exp_sum) * factor).where(exp_sum > 0, 0.0).sum(0) / total
    return top, total, mean


def _slopes(rows: Tensor, valid: int, statistics: Tensor, grad: Tensor) -> Tensor:
    """dH / dz_v = -p_v (z_v - sum_u p_u z_u) times ``grad``, for the statistics of ``_joined``."""
    result = torch.zeros_like(rows)
    start = 0
    for piece in _pieces(rows, valid):
        piece_rows = slice(start, start + len(piece))
        top, total, mean = statistics[:, piece_rows, None]
        centered = piece[:, :valid].double() - top
        slope = -(centered.exp() / total) * (centered - mean) * grad[piece_rows, None]
        result[piece_rows, :valid] = slope.to(result.dtype)
        start = piece_rows.stop
    return result


def _pieces(rows: Tensor, valid: int) -> tuple[Tensor, ...]:
    """A few rows at a time, because they are converted to float64."""
    return rows.split(max(MAX_BYTES // (8 * max(valid, 1)), 1))


def _parts(rows: Tensor, valid: int) -> Tensor:
    return torch.cat([_parts_of_piece(piece, valid) for piece in _pieces(rows, valid)], dim=-1)


def _parts_of_piece(rows: Tensor, valid: int) -> Tensor:
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
