"""Cross entropy of logits that are split over the vocabulary, without gathering them.

loss = log sum_v exp(z_v) - z_target. Source: Shoeybi et al. 2019, section 3 (fused parallel cross entropy).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.ops import Backend, cross_entropy_backward, cross_entropy_parts
from megatron_core.ops.operator import quick_apply
from megatron_core.parallel.collectives import start_gather_sequence
from megatron_core.parallel.current import tensor_parallel_group
from megatron_core.parallel.groups import Group
from megatron_core.parallel.tree_sum import tree_sum

INSTEAD = "gather the logits and take torch.nn.functional.cross_entropy"


def vocab_parallel_cross_entropy(
    vocab_parallel_logits: Tensor,
    target: Tensor,
    label_smoothing: float = 0.0,
    tp_group: Group | None = None,
    *,
    vocab_size: int | None = None,
    overwrite_logits: bool = False,
    backend: Backend = "auto",
    num_parts: int = 1,
) -> Tensor:
    """Logits ``[..., v/tp]`` and targets ``[...]`` (global ids) -> losses ``[...]``, float32 or wider.

    Columns from ``vocab_size`` on are padding, outside the softmax. With ``label_smoothing`` e the target distribution
    is (1 - e) at the target plus e / V everywhere (Szegedy et al. 2016, section 7). ``overwrite_logits``: backward
    writes the gradient into the logits, which must not be read again. The logits of a rank are ``num_parts`` parts of
    the vocabulary with a sum of exponentials each. ``LayoutError``: shapes do not match. The loss of a target such as
    -100 is not 0 (as in Megatron Core): mask it.
    """
    # Logits are the largest tensor of a model: they stay split over the ranks and in their own dtype, and with
    # ``overwrite_logits`` their gradient takes no memory. A second backward is then an error.
    # Parts are added in the order of ``tree_sum``, which is the same for any number of ranks.
    if vocab_parallel_logits.shape[:-1] != target.shape:
        raise LayoutError(
            f"logits {list(vocab_parallel_logits.shape)} and target {list(target.shape)} do not match; logits are "
            "[s, b, v/tp], targets [s, b], of the whole sequence (with sequence parallel the output layer gathers it)"
        )
    vocabulary = vocab_size, label_smoothing, tensor_parallel_group(tp_group), backend, num_parts
    # Only the losses: the second output holds statistics for backward.
    apply = _VocabParallelCrossEntropy.apply if torch.compiler.is_compiling() else _apply_eagerly
    return apply(vocab_parallel_logits, target, vocabulary, overwrite_logits)[0]


@dataclass(frozen=True)
class VocabularyLoss:
    """The cross entropy over a vocabulary of which this rank has the ``valid`` tokens that begin with ``first``.

    Logits are ``[..., columns]``, where the columns after the first ``valid`` ones are padding; targets ``[...]``.
    """

    group: Group
    first: int
    valid: int
    vocab_size: int
    label_smoothing: float
    backend: Backend
    num_parts: int = 1
    """Number of parts of this rank's columns with a sum of exponentials each."""

    @classmethod
    def of(
        cls,
        columns: int,
        vocab_size: int | None,
        label_smoothing: float,
        tp_group: Group | None,
        backend: Backend,
        num_parts: int = 1,
    ) -> "VocabularyLoss":
        """For logits with ``columns`` columns on each rank; no padding if ``vocab_size`` is None."""
        group = tensor_parallel_group(tp_group)
        first = group.rank() * columns
        total = group.size() * columns if vocab_size is None else vocab_size
        return cls(group, first, min(max(total - first, 0), columns), total, label_smoothing, backend, num_parts)

    def parts(self, logits: Tensor, target: Tensor) -> Tensor:
        """This rank's part of each loss, ``[num_parts, 4, ...]``."""
        statistics = []
        size = logits.shape[-1] // self.num_parts
        for start in range(0, size * self.num_parts, size):
            # Padding is at the end of the vocabulary, so that only the last parts have less than all columns, or none.
            valid = min(max(self.valid - start, 0), size)
            columns = logits[..., start : start + size] if self.num_parts > 1 else logits
            statistics.append(cross_entropy_parts(columns, target, self.first + start, valid, backend=self.backend))
        return torch.stack(statistics) if len(statistics) > 1 else statistics[0][None]

    def joined(self, statistics: Tensor) -> tuple[Tensor, Tensor]:
        """Combine the parts of all ranks in one collective -> losses ``[...]``, and the statistics for ``gradient``,
        ``[2, ...]``: the largest logit of the vocabulary and the sum of exponentials relative to it."""
        # An all-gather of four numbers per token instead of three all-reduces (maximum, sum of exponentials, logit of
        # the target), which would depend on one another; and the sum below has one order on all ranks.
        gathered, handle = start_gather_sequence(statistics, self.group)
        handle.wait()
        if len(gathered) == 1:
            # One part has nothing to rescale, and its sums are the result.
            largest, exp_sum, z_target, z_sum = gathered[0].unbind()
        else:
            maximum, exp_sum, z_target, z_sum = gathered.unbind(1)
            largest = maximum.amax(0)
            # Each part's sum is relative to its own maximum; rescaled to the largest one, no exponential overflows.
            exp_sum = tree_sum((exp_sum * (maximum - largest).exp()).unbind())
            z_target, z_sum = z_target.sum(0), z_sum.sum(0)
        losses = exp_sum.log() + (1.0 - self.label_smoothing) * (largest - z_target)
        if self.label_smoothing:
            losses += self.label_smoothing * (largest - z_sum / self.vocab_size)
        return losses, torch.stack([largest, exp_sum])

    def gradient(
        self, grad_losses: Tensor, logits: Tensor, target: Tensor, statistics: Tensor, *, overwrite: bool
    ) -> Tensor:
        """The gradient of the logits; with ``overwrite`` written into the memory of ``logits``."""
        # A graph of this gradient would read logits that no longer exist.
        if overwrite and torch.is_grad_enabled():
            raise NotImplementedError(
                "overwrite_logits=True: the cross entropy has no second derivative; set it to False, or remove "
                "create_graph=True (torch.func.grad sets it)"
            )
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
    generate_vmap_rule = True

    @staticmethod
    def forward(logits, target, vocabulary, overwrite):
        loss = VocabularyLoss.of(logits.shape[-1], *vocabulary)
        return loss.joined(loss.parts(logits, target))

    @staticmethod
    def setup_context(ctx, inputs, output):
        logits, target, ctx.vocabulary, ctx.overwrite = inputs
        # Statistics are saved for backward, but no loss depends on them.
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(logits, target, output[1])

    @staticmethod
    def backward(ctx, grad_losses, _):
        arguments = (grad_losses, *ctx.saved_tensors, ctx.vocabulary, ctx.overwrite)
        # Autograd detects that the logits were overwritten: a second backward is an error, not a wrong gradient.
        grad = _LogitsGradient.forward(*arguments).detach() if ctx.overwrite else _LogitsGradient.apply(*arguments)
        return grad, None, None, None


class _WithoutForwardMode(_VocabParallelCrossEntropy):
    """For eager mode: torch.compile does not support an ``autograd.Function`` with a ``jvp``."""

    @staticmethod
    def jvp(ctx, *tangents):
        raise NotImplementedError(f"vocab_parallel_cross_entropy has no forward-mode derivative; {INSTEAD}")


_apply_eagerly = quick_apply(_WithoutForwardMode)


class _LogitsGradient(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(grad_losses, logits, target, statistics, vocabulary, overwrite):
        # Recomputed from the shape: torch.compile does not carry symbolic sizes from forward to backward.
        loss = VocabularyLoss.of(logits.shape[-1], *vocabulary)
        return loss.gradient(grad_losses, logits, target, statistics, overwrite=overwrite)

    @staticmethod
    def setup_context(ctx, inputs, output):
        pass

    @staticmethod
    def backward(ctx, grad):
        raise NotImplementedError(f"vocab_parallel_cross_entropy has no second derivative; {INSTEAD}")
