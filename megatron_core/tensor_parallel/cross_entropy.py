"""Cross entropy of logits that are split over the vocabulary, without gathering them.

loss = log sum_v exp(z_v) - z_target. Source: Shoeybi et al. 2019, section 3 (fused parallel cross entropy).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_core import parallel_state
from megatron_core.errors import LayoutError
from megatron_core.ops import Backend, cross_entropy_backward, cross_entropy_parts
from megatron_core.parallel.collectives import start_gather_sequence
from megatron_core.parallel.groups import Group


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: Group | None = None,
    *,
    vocab_size: int | None = None,
    overwrite_logits: bool = False,
    backend: Backend = "auto",
) -> Tensor:
    """Logits ``[..., v/tp]`` and targets ``[...]`` (global ids) -> losses ``[...]``, float32 or wider.

    Columns at or beyond ``vocab_size`` are padding and take no part in the softmax. With ``label_smoothing`` e the
    target distribution is (1 - e) at the target plus e / V everywhere (Szegedy et al. 2016, section 7).
    What is kept for backward are the logits, in their own dtype. ``overwrite_logits`` lets the gradient take their
    place there, the largest tensor of a model: for callers who do not read them again. A second backward is an error
    then. ``backend`` says which body of the operation computes both.
    """
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise LayoutError(
            f"logits {list(vocab_parallel_logits.shape)} and target {list(target.shape)} do not fit; logits are [s, b, "
            "v/tp], targets [s, b] and whole on every rank (with sequence parallel the output layer gathers them)"
        )
    columns = vocab_parallel_logits.shape[-1]
    loss = VocabularyLoss.of(columns, vocab_size, label_smoothing, tp_group, backend)
    return _VocabParallelCrossEntropy.apply(vocab_parallel_logits, target, loss, overwrite_logits)


@dataclass(frozen=True)
class VocabularyLoss:
    """The cross entropy over a vocabulary of which this rank has ``valid`` tokens, those from ``first`` on.

    Logits are ``[..., columns]``, the columns behind the valid ones padding; targets ``[...]``.
    """

    group: Group
    first: int
    valid: int
    vocab_size: int
    label_smoothing: float
    backend: Backend

    @classmethod
    def of(
        cls, columns: int, vocab_size: int | None, label_smoothing: float, tp_group: Group | None, backend: Backend
    ) -> VocabularyLoss:
        """For logits with so many ``columns`` on each rank; by default none of them are padding."""
        group = tp_group if tp_group is not None else parallel_state.get_tensor_model_parallel_group()
        first = group.rank() * columns
        total = group.size() * columns if vocab_size is None else vocab_size
        return cls(group, first, min(max(total - first, 0), columns), total, label_smoothing, backend)

    def parts(self, logits: Tensor, target: Tensor) -> Tensor:
        """This rank's part of each loss, ``[4, ...]``."""
        return cross_entropy_parts(logits, target, self.first, self.valid, backend=self.backend)

    def joined(self, parts: Tensor) -> tuple[Tensor, Tensor]:
        """The parts of all ranks in one collective -> losses ``[...]``, and ``[2, ...]`` for ``gradient``: the largest
        logit of the vocabulary and the sum of exponentials relative to it."""
        gathered, handle = start_gather_sequence(parts.unsqueeze(0), self.group)
        handle.wait()
        maximum, exp_sum, z_target, z_sum = gathered.unbind(1)
        largest = maximum.amax(0)
        exp_sum = (exp_sum * (maximum - largest).exp()).sum(0)
        losses = exp_sum.log() + (1.0 - self.label_smoothing) * (largest - z_target.sum(0))
        if self.label_smoothing:
            losses += self.label_smoothing * (largest - z_sum.sum(0) / self.vocab_size)
        return losses, torch.stack([largest, exp_sum])

    def gradient(
        self, grad_losses: Tensor, logits: Tensor, target: Tensor, statistics: Tensor, *, overwrite: bool
    ) -> Tensor:
        """The gradient of the logits, which takes their place with ``overwrite``; it has no derivative itself."""
        if torch.is_grad_enabled():  # in a backward that is to be differentiated
            raise NotImplementedError("the cross entropy has no second derivative; leave out create_graph=True")
        return cross_entropy_backward(
            grad_losses,
            logits,
            target,
            statistics,
            self.first,
            self.valid,
            label_smoothing=self.label_smoothing,
            vocab_size=self.vocab_size,
            overwrite=overwrite,
            backend=self.backend,
        )


class _VocabParallelCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, target, loss, overwrite):
        losses, statistics = loss.joined(loss.parts(logits, target))
        ctx.save_for_backward(logits, target, statistics)
        ctx.loss, ctx.overwrite = loss, overwrite
        return losses

    @staticmethod
    def backward(ctx, grad_losses):
        # Autograd notices logits that are overwritten: a second backward is an error, never a wrong gradient.
        logits, target, statistics = ctx.saved_tensors
        grad = ctx.loss.gradient(grad_losses, logits, target, statistics, overwrite=ctx.overwrite)
        return grad.detach(), None, None, None
