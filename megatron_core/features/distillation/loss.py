"""Cross entropy and the divergence from a teacher's distribution, of logits that are split over the vocabulary.

With student logits z, teacher logits u, temperature T and weight w, the loss of a token with target y is
(1 - w) (log sum_v exp(z_v) - z_y) + w T^2 KL(softmax(u / T) || softmax(z / T)).
Source: Hinton et al. 2015 (arXiv 1503.02531), section 2, which has the factor T^2.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.ops.rows import wide
from megatron_core.parallel.collectives import start_gather_sequence
from megatron_core.parallel.groups import Group
from megatron_core.tensor_parallel.cross_entropy import VocabularyLoss

MAX_BYTES = 64 * 2**20
"""Bytes of wide logits of one model at a time: more would be needed for a moment at each of several temporaries."""


def vocab_parallel_distillation_loss(
    logits: Tensor,
    teacher_logits: Tensor,
    target: Tensor,
    *,
    weight: float,
    temperature: float,
    tp_group: Group,
    vocab_size: int,
) -> tuple[Tensor, Tensor]:
    """Logits ``[..., v/tp]`` of student and teacher, targets ``[...]`` (global ids) -> losses and T^2 KL, ``[...]``.

    Both results are float32 or wider; only the losses have a gradient, that of the student's logits. Backward, once,
    writes it into the memory of ``logits``, which the caller must not read again. Columns at or beyond ``vocab_size``
    are padding. ``LayoutError`` if the shapes do not match.
    """
    if logits.shape != teacher_logits.shape or logits.shape[:-1] != target.shape:
        raise LayoutError(
            f"logits {list(logits.shape)}, teacher_logits {list(teacher_logits.shape)} and target {list(target.shape)} "
            "do not match; logits are [s, b, v/tp] with the same columns, targets [s, b]"
        )
    columns = VocabularyLoss.of(logits.shape[-1], vocab_size, 0.0, tp_group, "auto")
    losses, divergence = _DistillationLoss.apply(
        logits, teacher_logits, target, _Columns(tp_group, columns.first, columns.valid, weight, temperature)
    )
    return losses, divergence


@dataclass(frozen=True)
class _Columns:
    """This rank's ``valid`` tokens of the vocabulary, which begin with ``first``, and the settings of the loss."""

    group: Group
    first: int
    valid: int
    weight: float
    temperature: float

    def pieces(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Iterate over tensors ``[n, ...]``, a few rows at a time."""
        columns = max(self.valid, 1) * torch.finfo(wide(tensors[0].dtype)).bits // 8
        return zip(*(tensor.split(max(MAX_BYTES // columns, 1)) for tensor in tensors), strict=True)

    def local(self, logits: Tensor) -> Tensor:
        """The columns of ``logits`` without padding, in the dtype of sums."""
        return logits[:, : self.valid].to(wide(logits.dtype))

    def targets(self, target: Tensor) -> tuple[Tensor, Tensor]:
        """Column of each target, and whether it is on this rank; the column is 0 if it is not."""
        is_local = (target >= self.first) & (target < self.first + self.valid)
        return (target - self.first).where(is_local, 0), is_local

    def parts(self, logits: Tensor, teacher: Tensor, target: Tensor) -> Tensor:
        """This rank's maxima, sums and target logits of rows ``[n, v/tp]`` -> ``[7, n]`` in float64.

        KL(u/T || z/T) is the small difference of logarithms of these sums, and is multiplied by T^2: in float32 it
        would consist of rounding errors, of either sign, for temperatures of 100 or more.
        """
        z = self.local(logits)
        u = self.local(teacher)
        if not self.valid:
            none = z.new_zeros(len(z), dtype=torch.float64)
            lowest = none - torch.inf
            return torch.stack([lowest, none, none, none, lowest, none, none])
        column, is_local = self.targets(target)
        at_target = z.gather(1, column[:, None])[:, 0].where(is_local, 0.0)
        largest = z.amax(1)
        largest_of_teacher = u.amax(1)
        weights = ((u - largest_of_teacher[:, None]) / self.temperature).exp_()
        mean = _total(weights * (u - z)) / self.temperature
        z = z - largest[:, None]
        sums = _total(z.exp()), _total((z / self.temperature).exp_())
        rows = [largest, *sums, at_target, largest_of_teacher, _total(weights), mean]
        return torch.stack([row.double() for row in rows])

    def joined(self, local: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Combine the parts of all ranks in one collective -> losses, T^2 KL, and statistics ``[5, n]`` of softmax."""
        gathered, handle = start_gather_sequence(local[None], self.group)
        handle.wait()
        largest, exp_sum, soft_sum, at_target, of_teacher, teacher_sum, mean = gathered.unbind(1)
        top = largest.amax(0)
        top_of_teacher = of_teacher.amax(0)
        heat = self.temperature
        exp_sum = (exp_sum * (largest - top).exp()).sum(0)
        soft_sum = (soft_sum * ((largest - top) / heat).exp()).sum(0)
        factor = ((of_teacher - top_of_teacher) / heat).exp()
        teacher_sum = (teacher_sum * factor).sum(0)
        mean = (mean * factor).sum(0)
        cross_entropy = exp_sum.log() + top - at_target.sum(0)
        divergence = mean / teacher_sum + (top - top_of_teacher) / heat + soft_sum.log() - teacher_sum.log()
        divergence = heat**2 * divergence.clamp_min(0.0)  # below 0 only by the rounding of each exponential
        losses = (1.0 - self.weight) * cross_entropy + self.weight * divergence
        return losses, divergence, torch.stack([top, exp_sum, soft_sum, top_of_teacher, teacher_sum])

    def write_gradient(
        self, grad_losses: Tensor, logits: Tensor, teacher: Tensor, target: Tensor, statistics: Tensor
    ) -> None:
        """Overwrite rows of ``logits`` ``[n, v/tp]`` by their gradient; ``statistics`` are ``[n, 5]``."""
        top, exp_sum, soft_sum, top_of_teacher, teacher_sum = (statistic[:, None] for statistic in statistics.unbind(1))
        z = self.local(logits) - top
        u = self.local(teacher) - top_of_teacher
        heat = self.temperature
        logits[:, self.valid :] = 0
        if not self.valid:
            return
        grad = ((z / heat).exp_() / soft_sum - (u / heat).exp_() / teacher_sum) * (self.weight * heat)
        if self.weight != 1.0:
            column, is_local = self.targets(target)
            of_target = z.exp_() / exp_sum
            of_target.scatter_add_(1, column[:, None], -is_local[:, None].to(z))
            grad += (1.0 - self.weight) * of_target
        logits[:, : self.valid] = grad * grad_losses[:, None]


def _total(values: Tensor) -> Tensor:
    """The sums of rows, accumulated in float64."""
    return values.sum(1, dtype=torch.float64)


class _DistillationLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, logits: Tensor, teacher: Tensor, target: Tensor, columns: _Columns) -> tuple[Tensor, Tensor]:
        pieces = columns.pieces(_rows(logits), _rows(teacher), target.reshape(-1))
        losses, divergence, statistics = columns.joined(torch.cat([columns.parts(*piece) for piece in pieces], -1))
        dtype = wide(logits.dtype)
        losses = losses.to(dtype)
        divergence = divergence.to(dtype).view(target.shape)
        statistics = statistics.to(dtype)
        ctx.columns = columns
        ctx.save_for_backward(logits, teacher, target, statistics)
        ctx.mark_non_differentiable(divergence)
        return losses.view(target.shape), divergence

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_losses: Tensor, _: Tensor) -> tuple[Tensor, None, None, None]:
        logits, teacher, target, statistics = ctx.saved_tensors
        columns: _Columns = ctx.columns
        rows = _rows(logits), _rows(teacher), target.reshape(-1), statistics.t(), grad_losses.reshape(-1)
        for z, u, ids, of_piece, grad in columns.pieces(*rows):
            columns.write_gradient(grad, z, u, ids, of_piece)
        return logits.detach(), None, None, None


def _rows(logits: Tensor) -> Tensor:
    """A view ``[n, v/tp]``."""
    return logits.view(-1, logits.shape[-1])
