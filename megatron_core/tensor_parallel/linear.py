"""y = x W^T with the collectives of a parallel layer before and after it, and its gradients.

Shapes: S sequence, B batch, I input, O output features of this rank: x_SBI, weight_OI, y_SBO.
Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2 for the sequence-parallel form.
"""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from megatron_core.ops import accumulate_weight_grad_, input_grad, linear
from megatron_core.parallel.collectives import (
    Done,
    Handle,
    start_all_reduce,
    start_gather_sequence,
    start_reduce_scatter_sequence,
)
from megatron_core.parallel.groups import Group, LocalGroup
from megatron_core.tensor_parallel.fp8 import FP8Gradients, FP8Products


@dataclass(frozen=True)
class LinearComm:
    """Communication of a linear layer over its tensor-parallel group."""

    group: Group
    gather_sequence: bool = False
    """The input is split along the sequence: all-gather it in forward, reduce-scatter its gradient in backward."""
    reduce_input_grad: bool = False
    """The input is replicated: sum its gradient over the group."""
    overlap: bool = True
    """Overlap the reduction of the input gradient with the computation of the weight gradient."""


NO_COMM = LinearComm(LocalGroup())


def parallel_linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    comm: LinearComm = NO_COMM,
    *,
    fp8: FP8Products | None = None,
) -> Tensor:
    """x_SBI (or x_sBI, split along the sequence), weight_OI, bias_O -> y_SBO.

    If ``weight`` has a ``main_grad``, its gradient is added there and autograd gets None. If it has a collecting
    ``grad_queue`` (``pipeline_parallel.weight_grad``), its gradient is computed when the queue runs. ``fp8``, if
    given, computes the matrix products.
    """
    training = torch.is_grad_enabled()
    if fp8 is None and not training:
        return linear(gather_input(x, comm), weight, bias)
    return _ParallelLinear.apply(x, weight, bias, comm, fp8, training)


class _ParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, comm, fp8, training):
        ctx.save_for_backward(x, weight)  # the weight too, so that autograd detects a change before backward
        # After recomputation the saved weight is another tensor without main_grad and grad_queue, so keep this one.
        ctx.weight, ctx.comm, ctx.has_bias, ctx.fp8 = weight, comm, bias is not None, fp8
        if fp8 is None:
            return linear(gather_input(x, comm), weight, bias)
        if comm.gather_sequence and fp8.per_tensor:
            y, ctx.scales = fp8.output(x, weight, record=training, gather=comm.group)
        else:
            y, ctx.scales = fp8.output(gather_input(x, comm), weight, record=training)
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx, grad_y):
        x, _ = ctx.saved_tensors
        weight, comm = ctx.weight, ctx.comm
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        grad_bias = grad_y.reshape(-1, grad_y.shape[-1]).sum(0) if ctx.has_bias and needs_bias else None
        narrow = None if ctx.fp8 is None else FP8Gradients(ctx.fp8, weight, grad_y, ctx.scales)
        gradients = Gradients(weight, grad_y, narrow)
        if needs_weight and _is_deferred(gradients, x, comm):
            needs_weight = False
        grad_x, grad_weight = _input_and_weight_grads(gradients, x, comm, needs_x, needs_weight)
        return grad_x, grad_weight, grad_bias, None, None, None


@dataclass(frozen=True)
class Gradients:
    """The products of backward: in FP8 with ``narrow``, if given, else in the precision of ``grad_y``."""

    weight: nn.Parameter
    grad_y: Tensor
    narrow: FP8Gradients | None

    def of_input(self) -> Tensor:
        """dL/dx = dL/dy W, not yet summed over ranks."""
        return input_grad(self.grad_y, self.weight) if self.narrow is None else self.narrow.of_input()

    def start_gather(self, x: Tensor, comm: LinearComm) -> tuple[Tensor, Handle]:
        """Start gathering the input along the sequence, for ``of_weight``; in FP8 if that product is in FP8."""
        if comm.gather_sequence and self.narrow is not None and self.narrow.takes_bytes():
            x = self.narrow.input_bytes(x)
        return start_gather_sequence(x, comm.group) if comm.gather_sequence else (x, Done())

    def of_weight(self, x: Tensor) -> Tensor | None:
        """``weight_grad`` from the result of ``start_gather``."""
        if self.narrow is None or not self.narrow.fp8.multiplies_weight_grad():
            return weight_grad(self.weight, x, self.grad_y)
        main_grad = main_grad_of(self.weight)
        if main_grad is None:
            return self.narrow.of_weight(x, self.weight.dtype)
        main_grad.add_(self.narrow.of_weight(x, main_grad.dtype))
        return None


def _input_and_weight_grads(
    gradients: Gradients, x: Tensor, comm: LinearComm, needs_x: bool, needs_weight: bool
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients; the communication of each overlaps with the computation of the other."""
    x, gathering = gradients.start_gather(x, comm) if needs_weight else (x, Done())
    grad_x, reducing = start_input_grad_reduction(gradients.of_input(), comm) if needs_x else (None, Done())
    gathering.wait()
    if not comm.overlap:
        reducing.wait()
    grad_weight = gradients.of_weight(x) if needs_weight else None
    if comm.overlap:
        reducing.wait()
    return grad_x, grad_weight


def _is_deferred(gradients: Gradients, x: Tensor, comm: LinearComm) -> bool:
    """Queue the weight gradient if a split backward attached a queue to the weight; returns whether it did."""
    weight = gradients.weight
    queue = getattr(weight, "grad_queue", None)
    if queue is None or not queue.is_collecting:
        return False

    def job() -> None:
        whole, gathering = gradients.start_gather(x, comm)
        gathering.wait()
        add_to_grad(weight, gradients.of_weight(whole))

    queue.put(job)
    return True


def gather_input(x: Tensor, comm: LinearComm) -> Tensor:
    """The input of the matrix product, gathered along the sequence if it is split."""
    if not comm.gather_sequence:
        return x
    full, handle = start_gather_sequence(x, comm.group)
    handle.wait()
    return full


def start_input_grad_reduction(grad_x: Tensor, comm: LinearComm) -> tuple[Tensor, Handle]:
    """Start reducing the gradient of the gathered input over the group; it is split like the input."""
    if comm.gather_sequence:
        return start_reduce_scatter_sequence(grad_x, comm.group)
    if comm.reduce_input_grad:
        return start_all_reduce(grad_x, comm.group)
    return grad_x, Done()


def weight_grad(weight: nn.Parameter, x: Tensor, grad_y: Tensor) -> Tensor | None:
    """dL/dW_OI = grad_y_SBO^T x_SBI; returns None if it is added to ``weight.main_grad``."""
    flat_x, flat_grad = x.reshape(-1, x.shape[-1]), grad_y.reshape(-1, grad_y.shape[-1])
    main_grad = main_grad_of(weight)
    if main_grad is None:
        return flat_grad.t().matmul(flat_x)
    accumulate_weight_grad_(main_grad, flat_grad, flat_x)
    return None


def add_to_grad(weight: nn.Parameter, grad: Tensor | None) -> None:
    """Accumulate in ``weight.grad`` a gradient that was not added to ``main_grad``, as autograd does."""
    if grad is not None:
        weight.grad = grad if weight.grad is None else weight.grad + grad


def main_grad_of(weight: nn.Parameter) -> Tensor | None:
    """The allocated buffer to which a weight's gradient is added; None if autograd accumulates it."""
    if (open_grad := getattr(weight, "open_grad", None)) is not None:
        open_grad()
    return getattr(weight, "main_grad", None)
