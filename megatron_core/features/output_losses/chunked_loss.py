"""Output layer and cross entropy together, a few tokens at a time, so that the complete logits are never in memory.

Shapes: S sequence, B batch, I input features, V this rank's part of the vocabulary, N = S B tokens: x_SBI, weight_VI.
Source: Wijmans et al. 2024, section 4, for the recomputation of the logits; see also ``linear`` and ``cross_entropy``.
"""

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from megatron_core.errors import LayoutError
from megatron_core.ops import Backend, input_grad, linear
from megatron_core.tensor_parallel.cross_entropy import VocabularyLoss
from megatron_core.tensor_parallel.linear import weight_grad
from megatron_core.tensor_parallel.linear_comm import NO_COMM, LinearComm, gather_input, start_input_grad_reduction

MAX_LOGIT_BYTES = 64 * 2**20
"""Bytes of logits in memory at a time: 1,048 tokens for a vocabulary of 32,000 in bfloat16. Each chunk adds once to the
main gradient of the weight; with chunks of an eighth of this size, forward and backward take up to 1.5 times as long
(docs/kernels.md)."""


def linear_cross_entropy(
    hidden: Tensor,
    weight: nn.Parameter,
    target: Tensor,
    comm: LinearComm = NO_COMM,
    *,
    label_smoothing: float = 0.0,
    vocab_size: int | None = None,
    backend: Backend = "auto",
    max_logit_bytes: int = MAX_LOGIT_BYTES,
    loss: VocabularyLoss | None = None,
) -> Tensor:
    """hidden_SBI (or hidden_sBI, split along the sequence), weight_VI, target_SB (global ids) -> losses_SB.

    Equal to ``parallel_linear`` followed by ``vocab_parallel_cross_entropy``, but only ``max_logit_bytes`` of logits
    (or one token's) are in memory at a time. Backward recomputes them: one more matrix product. If ``weight`` has a
    ``main_grad``, its gradient is added there and never deferred, because that would keep the logits; otherwise the
    gradients of all chunks are summed in the weight's dtype. ``loss`` replaces cross entropy; it may have several
    numbers for each token, losses_SB*. ``LayoutError`` if the shapes do not match.
    """
    sequence = hidden.shape[0] * (comm.group.size() if comm.gather_sequence else 1)
    if (sequence, *hidden.shape[1:-1]) != target.shape:
        raise LayoutError(
            f"hidden {list(hidden.shape)} and target {list(target.shape)} do not match; hidden is [s, b, h], or with "
            "sequence parallel [s/tp, b, h], and target [s, b], whole on every rank"
        )
    loss = loss or VocabularyLoss.of(len(weight), vocab_size, label_smoothing, comm.group, backend)
    # At least one token, however large the vocabulary is.
    rows_in_memory = max(max_logit_bytes // (len(weight) * weight.element_size()), 1)
    num_chunks = max(-(-target.numel() // rows_in_memory), 1)
    rows = max(-(-target.numel() // num_chunks), 1)  # chunks of nearly equal size
    return _LinearCrossEntropy.apply(hidden, weight, target, loss, comm, rows)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, hidden, weight, target, loss, comm, tokens):
        # Gathered once for all chunks; backward gathers again, so that only the split input is kept.
        x = gather_input(hidden, comm)
        statistics_of_chunks = [
            loss.parts(linear(rows, weight), ids) for rows, ids in _pieces(tokens, _flat(x), target.reshape(-1))
        ]
        # One collective for all chunks: their statistics have four numbers for each token.
        losses, statistics = loss.joined(torch.cat(statistics_of_chunks, -1))
        ctx.save_for_backward(hidden, weight, target, statistics)
        # After recomputation the saved weight is another tensor without main_grad, so keep this one.
        ctx.weight = weight
        ctx.loss = loss
        ctx.comm = comm
        ctx.tokens = tokens
        return losses.view(*target.shape, *losses.shape[1:])

    @staticmethod
    def backward(ctx, grad_losses):
        hidden, _, target, statistics = ctx.saved_tensors
        weight = ctx.weight
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        x = gather_input(hidden, ctx.comm)
        grad_x = torch.empty_like(x, memory_format=torch.contiguous_format) if needs_x else None
        grad_weight = None
        tensors = (_flat(x), target.reshape(-1), statistics.t(), grad_losses.flatten(0, target.dim() - 1))
        for number, (rows, ids, statistics_of_rows, grad) in enumerate(_pieces(ctx.tokens, *tensors)):
            logits = linear(rows, weight)
            # The logits of a chunk are used up, so that their gradient takes their memory.
            grad_y = ctx.loss.gradient(grad, logits, ids, statistics_of_rows.t(), overwrite=True)
            if needs_x:
                _flat(grad_x)[number * ctx.tokens :][: len(ids)] = input_grad(grad_y, weight)
            if needs_weight:
                # None if the gradient was added to ``main_grad``.
                grad_weight = _sum(grad_weight, weight_grad(weight, rows, grad_y))
        if needs_x:
            grad_x, reducing = start_input_grad_reduction(grad_x, ctx.comm)
            reducing.wait()
        return grad_x, grad_weight, None, None, None, None


def _flat(x: Tensor) -> Tensor:
    return x.reshape(-1, x.shape[-1])


def _pieces(tokens: int, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Iterate over the tensors, ``tokens`` rows at a time."""
    return zip(*(tensor.split(tokens) for tensor in tensors), strict=True)


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    if a is None or b is None:
        return b if a is None else a
    return a.add_(b)
