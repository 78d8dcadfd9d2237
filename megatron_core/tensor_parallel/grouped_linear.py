"""y = x W_e^T for contiguous rows per expert, with gradients added to ``main_grad``."""

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from megatron_core.ops.fp8 import Quantised
from megatron_core.ops.fp8_grouped import add_fp8_weight_grads_, grouped_fp8_product
from megatron_core.ops.grouped import accumulate_grouped_weight_grad_, grouped_product, grouped_weight_grad
from megatron_core.tensor_parallel.fp8 import FP8Products
from megatron_core.tensor_parallel.linear import add_to_grad, main_grad_of


def grouped_linear(x: Tensor, weight: nn.Parameter, counts: Sequence[int], *, fp8: FP8Products | None = None) -> Tensor:
    """``x`` ``[R, I]``, ``weight`` ``[E, O, I]`` -> ``[R, O]``; expert e has the next ``counts[e]`` rows.

    Weight gradients are handled as in ``parallel_linear``: added to ``main_grad`` in its precision, or deferred by a
    split backward. An expert without rows has gradient 0. ``fp8``, if given, quantises the factors.
    """
    return _GroupedLinear.apply(x, weight, counts, fp8, torch.is_grad_enabled())


class _GroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, counts, fp8, training):
        ctx.save_for_backward(x, weight)
        # After recomputation the saved weight is another tensor without main_grad and grad_queue, so keep this one.
        ctx.weight, ctx.counts, ctx.fp8 = weight, counts, fp8
        if fp8 is None:
            return grouped_product(x, weight.transpose(1, 2), counts)
        rows, matrices = (
            fp8.quantise(role, own, 1, record=training) for role, own in (("input", x), ("weight", weight))
        )
        return grouped_fp8_product(rows, matrices.t(), counts, x.dtype)

    @staticmethod
    def backward(ctx, grad_y):
        x, _ = ctx.saved_tensors
        weight, counts, grad_y = ctx.weight, ctx.counts, grad_y.contiguous()
        grad_weight, queue, fp8 = None, getattr(weight, "grad_queue", None), ctx.fp8
        rows = None if fp8 is None else fp8.quantise("grad", grad_y, 1, record=True)
        if ctx.needs_input_grad[1]:
            add = _weight_grad
            if fp8 is not None and fp8.multiplies_weight_grad():
                add = partial(_narrow_weight_grad, fp8, rows)
            if queue is not None and queue.is_collecting:
                queue.put(lambda: add_to_grad(weight, add(weight, x, grad_y, counts)))
            else:
                grad_weight = add(weight, x, grad_y, counts)
        grad_x = None
        if ctx.needs_input_grad[0] and fp8 is None:
            grad_x = grouped_product(grad_y, weight.detach(), counts)
        elif ctx.needs_input_grad[0]:
            grad_x = grouped_fp8_product(rows, fp8.quantise("weight", weight.detach(), 0), counts, x.dtype)
        return grad_x, grad_weight, None, None, None


def _weight_grad(weight: nn.Parameter, x: Tensor, grad_y: Tensor, counts: Sequence[int]) -> Tensor | None:
    """dL/dW_e = grad_y_e^T x_e ``[E, O, I]``; returns None if it is added to ``weight.main_grad``."""
    main_grad = main_grad_of(weight)
    if main_grad is None:
        return grouped_weight_grad(grad_y, x, counts)
    accumulate_grouped_weight_grad_(main_grad, grad_y, x, counts)
    return None


def _narrow_weight_grad(
    fp8: FP8Products, grad: Quantised, weight: nn.Parameter, x: Tensor, _: Tensor, counts: Sequence[int]
) -> Tensor | None:
    """``_weight_grad`` in FP8 with one scale for all rows; ``grad`` is the quantised ``grad_y``."""
    rows, main_grad = fp8.quantise("input", x, 0), main_grad_of(weight)
    total = torch.zeros_like(weight) if main_grad is None else main_grad
    add_fp8_weight_grads_(total, grad, rows, counts)
    return total if main_grad is None else None
