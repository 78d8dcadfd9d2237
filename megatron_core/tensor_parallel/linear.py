"""y = x W^T with the collectives of a parallel layer before and after it, and its gradients.

Shapes: S sequence, B batch, I input, O output features of this rank: x_SBI, weight_OI, y_SBO.
Source: Shoeybi et al. 2019, section 3; Korthikanti et al. 2022, section 4.2.2 for the sequence-parallel form.
"""

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any, cast
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from megatron_core.ops import accumulate_weight_grad_, input_grad, linear
from megatron_core.ops.operator import define, quick_apply
from megatron_core.parallel.collectives import (
    copy_to_region,
    gather_from_sequence,
    reduce_from_region,
    reduce_scatter_to_sequence,
    start_gather_sequence,
)
from megatron_core.parallel.compiled import group_named
from megatron_core.parallel.groups import process_group
from megatron_core.parallel.handles import Done, Handle
from megatron_core.tensor_parallel.linear_comm import (
    NO_COMM,
    LinearComm,
    gather_input,
    gather_output_grad,
    multiply_arriving,
    pipelined_output,
    reduced_output,
    start_input_grad_reduction,
    start_multiply_and_sum,
)


class LinearGradients:
    """The products of backward in the precision of ``grad_y``."""

    def __init__(self, weight: nn.Parameter, grad_y: Tensor) -> None:
        self.weight = weight
        self.grad_y = grad_y

    def of_input(self) -> Tensor:
        """dL/dx = dL/dy W, not yet summed over ranks."""
        return input_grad(self.grad_y, self.weight)

    def start_gather(self, x: Tensor, comm: LinearComm) -> tuple[Tensor, Handle]:
        """Start gathering the input along the sequence, for ``of_weight``."""
        return start_gather_sequence(x, comm.group) if comm.gather_sequence else (x, Done())

    def of_weight(self, x: Tensor) -> Tensor | None:
        """``weight_grad`` from the result of ``start_gather``."""
        return weight_grad(self.weight, x, self.grad_y)

    def gather_and_multiply(self, x: Tensor, comm: LinearComm) -> Tensor | None:
        """``of_weight`` from the input of this rank."""
        gathered, gathering = self.start_gather(x, comm)
        gathering.wait()
        return self.of_weight(gathered)


class MatrixProducts:
    """The products of a linear layer; a feature derives others, whose objects belong to one layer and may keep state.

    This class computes them in the precision of the tensors.
    """

    # False for products in another precision: they must see dL/dy as a whole, for example to scale it.
    has_pipelined_backward = False
    """Whether backward may multiply parts of dL/dy by ``weight`` while others arrive, without ``gradients``."""

    def output(
        self, x: Tensor, weight: Tensor, bias: Tensor | None, comm: LinearComm, *, training: bool
    ) -> tuple[Tensor, Tensor, Any]:
        """y_SBO of ``parallel_linear``, the tensor to save for the weight gradient, and data for ``gradients``."""
        return _output(x, weight, bias, comm), x, None

    def gradients(self, weight: nn.Parameter, grad_y: Tensor, saved: Any) -> LinearGradients:
        """The products of backward from the gathered ``grad_y`` and the data of ``output``."""
        return LinearGradients(weight, grad_y)


class PlainProducts(MatrixProducts):
    """The products of a layer that no feature replaces."""

    has_pipelined_backward = True


PLAIN_PRODUCTS = PlainProducts()


def parallel_linear(
    x: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    comm: LinearComm = NO_COMM,
    *,
    products: MatrixProducts | None = None,
) -> Tensor:
    """x_SBI (or x_sBI, split along the sequence), weight_OI, bias_O -> y_SBO (or y_sBO).

    A product whose output is summed over ranks has no bias: each rank would add it. If ``weight`` has a ``main_grad``,
    its gradient is added there and autograd gets None. A split backward may compute it later
    (``defers_weight_grad``). ``products``, if given, computes the matrix products.
    """
    if torch.compiler.is_compiling():
        assert products is None, "validated: torch.compile has no products in another precision"
        return _compiled_linear(x, weight, bias, comm)
    # Read here: inside of an autograd.Function gradients are always disabled.
    training = torch.is_grad_enabled()
    # Evaluation needs no autograd function, whose overhead counts when one token at a time is generated.
    if products is None and not training:
        return _output(x, weight, bias, comm)
    return _apply_linear(x, weight, bias, comm, products or PLAIN_PRODUCTS, training)


class _ParallelLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, comm, products, training):
        # After recomputation the saved weight is another tensor without main_grad and grad_queue, so keep this one.
        ctx.weight = weight
        ctx.comm = comm
        ctx.has_bias = bias is not None
        ctx.products = products
        y, saved_x, ctx.saved_by_products = products.output(x, weight, bias, comm, training=training)
        ctx.save_for_backward(saved_x, weight)  # the weight too, so that autograd detects a change before backward
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, _ = ctx.saved_tensors
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        if torch.is_grad_enabled():
            grad_x, grad_weight = _differentiable_grads(ctx, x, grad_y)
        else:
            grad_x, grad_weight = _input_and_weight_grads(
                ctx.weight, grad_y, x, ctx.comm, needs_x, needs_weight, ctx.products, ctx.saved_by_products
            )
        return grad_x, grad_weight, _bias_grad(grad_y) if ctx.has_bias and needs_bias else None, None, None, None


_apply_linear = quick_apply(_ParallelLinear)


def _differentiable_grads(ctx: Any, x: Tensor, grad_y: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients for ``create_graph=True``, from a second forward of which autograd records every step."""
    if ctx.products is not PLAIN_PRODUCTS:
        raise NotImplementedError("second derivatives of linear layers need products in the precision of the tensors")
    comm = ctx.comm
    whole_x = gather_from_sequence(x, comm.group) if comm.gather_sequence else x
    y = linear(copy_to_region(whole_x, comm.group) if comm.reduce_input_grad else whole_x, ctx.weight, None)
    y = reduce_scatter_to_sequence(y, comm.group) if comm.scatter_sequence else y
    y = reduce_from_region(y, comm.group) if comm.reduce_output else y
    needed = [tensor for tensor, is_needed in zip((x, ctx.weight), ctx.needs_input_grad, strict=False) if is_needed]
    grads = dict(zip(map(id, needed), torch.autograd.grad(y, needed, grad_y, create_graph=True), strict=True))
    return grads.get(id(x)), grads.get(id(ctx.weight))


def _output(x: Tensor, weight: Tensor, bias: Tensor | None, comm: LinearComm) -> Tensor:
    if comm.is_local:
        return linear(x, weight, bias)
    if comm.is_pipelined:
        return pipelined_output(x, weight, bias, comm)
    return reduced_output(linear(gather_input(x, comm), weight, bias), comm)


def _bias_grad(grad_y: Tensor) -> Tensor:
    return grad_y.reshape(-1, grad_y.shape[-1]).sum(0)


# torch.compile.


_numbered: WeakValueDictionary[int, nn.Parameter] = WeakValueDictionary()
"""Parameters with a ``main_grad`` that compiled layers read, by number."""
_numbers = count()


def number_weights(parameters: Iterable[nn.Parameter]) -> None:
    """Let compiled layers find these parameters, to add their gradients to ``main_grad`` or to a ``grad_queue``.

    A graph does not have the parameter object, only its ``number``: a tensor, so that equal layers share a graph.
    """
    for parameter in parameters:
        number = next(_numbers)
        numbered = cast(Any, parameter)
        _numbered[number] = parameter
        numbered.number = torch.tensor(number)


def _compiled_linear(x: Tensor, weight: nn.Parameter, bias: Tensor | None, comm: LinearComm) -> Tensor:
    """``parallel_linear`` in a graph: one operator without a visible body for the forward, and one for the backward."""
    # Layers of one rank share a graph whatever their communication would be.
    comm = comm if comm.group.size() > 1 else NO_COMM
    group = process_group(comm.group).group_name if comm is not NO_COMM else ""
    return _linear(x, weight, bias, getattr(weight, "number", None), group, comm.group.size(), comm.options)


def _comm_of(group: str, options: Sequence[int]) -> LinearComm:
    if not group:
        return NO_COMM
    *flags, chunks = options
    gather, reduce_grad, scatter, reduce, overlap = map(bool, flags)
    return LinearComm(group_named(group), gather, reduce_grad, scatter, reduce, overlap, chunks)


@define("parallel_linear")
def _linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    number: Tensor | None,
    group: str,
    ranks: int,
    options: Sequence[int],
) -> Tensor:
    return _output(x, weight, bias, _comm_of(group, options))


@define("parallel_linear_backward")
def _linear_backward(
    grad_y: Tensor,
    x: Tensor,
    weight: Tensor,
    number: Tensor | None,
    group: str,
    options: Sequence[int],
    needs_x: bool,
    needs_weight: bool,
) -> tuple[Tensor, Tensor]:
    """-> (dL/dx, dL/dW); each is empty if it is not needed, dL/dW also if it is added to ``main_grad``."""
    owner = nn.Parameter(weight) if number is None else _numbered[int(number)]
    grads = _input_and_weight_grads(owner, grad_y, x, _comm_of(group, options), needs_x, needs_weight)
    grad_x, grad_weight = (grad_y.new_empty(0) if grad is None else grad for grad in grads)
    return grad_x, grad_weight


def _fake_linear(x: Tensor, weight: Tensor, *settings: Any) -> Tensor:
    *_, ranks, (gather, _, scatter, *_) = settings
    rows = x.shape[0] * (ranks if gather else 1) // (ranks if scatter else 1)
    return x.new_empty((rows, *x.shape[1:-1], weight.shape[0]))


def _fake_linear_backward(grad_y: Tensor, x: Tensor, weight: Tensor, number: Tensor | None, *settings: Any) -> Any:
    *_, needs_x, needs_weight = settings
    returned = needs_weight and number is None
    return x.new_empty(x.shape if needs_x else 0), weight.new_empty(weight.shape if returned else 0)


def _save_linear(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, number, group, _, options = inputs
    ctx.has_bias = bias is not None
    ctx.comm = (group, options)
    ctx.save_for_backward(x, weight, number)


def _backward_of_linear(ctx: Any, grad_y: Tensor) -> tuple[Any, ...]:
    x, weight, number = ctx.saved_tensors
    of_x, of_weight, of_bias, *_ = ctx.needs_input_grad
    grad_x, grad_weight = _linear_backward(grad_y, x, weight, number, *ctx.comm, of_x, of_weight)
    gradients = grad_x if of_x else None, grad_weight if of_weight and number is None else None
    return *gradients, _bias_grad(grad_y) if ctx.has_bias and of_bias else None, *[None] * 4


# Two operators instead of an autograd.Function in the graph: torch.compile would trace into it, and neither main_grad
# nor the order of collectives and products would survive.
torch.library.register_fake("megatron_core::parallel_linear", _fake_linear)
torch.library.register_fake("megatron_core::parallel_linear_backward", _fake_linear_backward)
torch.library.register_autograd("megatron_core::parallel_linear", _backward_of_linear, setup_context=_save_linear)
torch.fx.node.has_side_effect(_linear_backward)  # it may only add to main_grad


def _input_and_weight_grads(
    weight: nn.Parameter,
    grad_y: Tensor,
    x: Tensor,
    comm: LinearComm,
    needs_x: bool,
    needs_weight: bool,
    products: MatrixProducts = PLAIN_PRODUCTS,
    saved: Any = None,
) -> tuple[Tensor | None, Tensor | None]:
    """Both gradients, without that of the weight if it is deferred.

    The communication of each overlaps with the computation of the other.
    """
    # One rank has the two products alone. The objects below, which order exchanges, take longer than small products.
    if comm.is_local and products is PLAIN_PRODUCTS and getattr(weight, "grad_queue", None) is None:
        grad_x = input_grad(grad_y, weight) if needs_x else None
        return grad_x, weight_grad(weight, x, grad_y) if needs_weight else None
    # A row-parallel layer has no communication for x and dL/dx, a column-parallel layer none for dL/dy.
    grad_x = None
    reducing: Handle = Done()
    is_pipelined = comm.is_pipelined and products.has_pipelined_backward
    if comm.scatter_sequence and is_pipelined and needs_x:
        grad_y, grad_x = multiply_arriving(grad_y, weight.t(), None, comm)
    else:
        grad_y = gather_output_grad(grad_y, comm)
    gradients = products.gradients(weight, grad_y, saved)
    # The input is gathered only by the deferred job, so that a waiting one does not keep the whole sequence.
    needs_weight = needs_weight and not defers_weight_grad(weight, lambda: gradients.gather_and_multiply(x, comm))
    # Gathered again instead of kept: otherwise sequence parallelism would only save memory between the layers
    # (Korthikanti et al. 2022, section 4.2.2).
    x, gathering = gradients.start_gather(x, comm) if needs_weight else (x, Done())
    # dL/dx first: its reduction is then in flight during the product of dL/dW, which needs no other rank.
    if needs_x and grad_x is None:
        grad_x, reducing = _start_input_grad(gradients, comm, is_pipelined=is_pipelined)
    gathering.wait()
    # The reference without overlap waits here, and computes the same in the same order.
    if not comm.overlap:
        reducing.wait()
    grad_weight = gradients.of_weight(x) if needs_weight else None
    if comm.overlap:
        reducing.wait()
    return grad_x, grad_weight


def _start_input_grad(
    gradients: LinearGradients, comm: LinearComm, *, is_pipelined: bool
) -> tuple[Tensor | None, Handle]:
    if is_pipelined and (comm.gather_sequence or comm.reduce_input_grad):
        return start_multiply_and_sum(gradients.grad_y, gradients.weight.t(), comm, scatter=comm.gather_sequence)
    return start_input_grad_reduction(gradients.of_input(), comm)


def defers_weight_grad(weight: nn.Parameter, job: Callable[[], Tensor | None]) -> bool:
    """Whether a split backward (Qi et al. 2024) computes a weight's gradient later, in a bubble of the pipeline.

    ``job`` returns the gradient, or None if it added it to ``main_grad``.
    """
    queue = getattr(weight, "grad_queue", None)
    return queue is not None and queue.takes(weight, job)


def weight_grad(weight: nn.Parameter, x: Tensor, grad_y: Tensor) -> Tensor | None:
    """dL/dW_OI = grad_y_SBO^T x_SBI; returns None if it is added to ``weight.main_grad``."""
    flat_x = x.reshape(-1, x.shape[-1])
    flat_grad = grad_y.reshape(-1, grad_y.shape[-1])
    main_grad = main_grad_of(weight)
    if main_grad is None:
        return flat_grad.t().matmul(flat_x)
    # In the precision of ``main_grad``, without a gradient of the weight's size in between (Megatron's
    # gradient_accumulation_fusion).
    accumulate_weight_grad_(main_grad, flat_grad, flat_x)
    return None


def main_grad_of(weight: nn.Parameter) -> Tensor | None:
    """The allocated buffer to which a weight's gradient is added; None if autograd accumulates it."""
    # Data parallelism allocates gradients at their first use, which it learns from this call.
    if (open_grad := getattr(weight, "open_grad", None)) is not None:
        open_grad()
    return getattr(weight, "main_grad", None)
