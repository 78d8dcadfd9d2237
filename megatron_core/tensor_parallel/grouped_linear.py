"""y = x W_e^T for runs of rows that belong to one expert each, with gradients that are added to ``main_grad``."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_core.ops import Backend, accumulate_weight_grad_
from megatron_core.ops.grouped import grouped_product, runs
from megatron_core.tensor_parallel.linear import main_grad_of


def grouped_linear(x: Tensor, weight: nn.Parameter, counts: Sequence[int], *, backend: Backend = "auto") -> Tensor:
    """``x`` ``[R, I]``, ``weight`` ``[E, O, I]`` -> ``[R, O]``; ``counts[e]`` rows in a row belong to expert e.

    Weight gradients are handled as ``parallel_linear`` handles them: added to ``main_grad`` in its precision, later if
    a split backward collects them. An expert without rows has the gradient 0. ``backend`` selects what adds them.
    """
    return _GroupedLinear.apply(x, weight, counts, backend)


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts, backend):
        ctx.save_for_backward(x, weight)
        # After recomputation the saved weight is another tensor, without main_grad and grad_queue: keep this one.
        ctx.weight, ctx.counts, ctx.backend = weight, counts, backend
        return grouped_product(x, weight.transpose(1, 2), counts)

    @staticmethod
    def backward(ctx, grad_y):
        x, _ = ctx.saved_tensors
        weight, counts, backend, grad_y = ctx.weight, ctx.counts, ctx.backend, grad_y.contiguous()
        grad_weight, queue = None, getattr(weight, "grad_queue", None)
        if ctx.needs_input_grad[1]:
            if queue is not None and queue.is_collecting:
                queue.put(lambda: _add_to_grad(weight, _weight_grad(weight, x, grad_y, counts, backend)))
            else:
                grad_weight = _weight_grad(weight, x, grad_y, counts, backend)
        grad_x = grouped_product(grad_y, weight.detach(), counts) if ctx.needs_input_grad[0] else None
        return grad_x, grad_weight, None, None


def _weight_grad(
    weight: nn.Parameter, x: Tensor, grad_y: Tensor, counts: Sequence[int], backend: Backend
) -> Tensor | None:
    """dL/dW_e = grad_y_e^T x_e ``[E, O, I]``; added to ``weight.main_grad`` if there is one, and then None.

    One product for each expert: it adds in the precision of ``main_grad``, which a grouped product does not.
    """
    main_grad = main_grad_of(weight)
    if main_grad is None:
        grad = torch.empty_like(weight)
        for run, own in zip(runs(counts), grad, strict=True):
            torch.mm(grad_y[run].t(), x[run], out=own)  # without rows 0
        return grad
    for run, own in zip(runs(counts), main_grad, strict=True):
        if run.start < run.stop:
            accumulate_weight_grad_(own, grad_y[run], x[run], backend=backend)
    return None


def _add_to_grad(weight: nn.Parameter, grad: Tensor | None) -> None:
    """Accumulate as autograd does what was not added to ``main_grad``."""
    if grad is not None:
        weight.grad = grad if weight.grad is None else weight.grad + grad
