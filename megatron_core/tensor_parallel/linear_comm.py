"""Communication of a linear layer over its tensor-parallel group, before and after the matrix product.

Shapes: S sequence, B batch, I input, O output features of this rank; the matrix is ``[O, I]``.
Source: Wang et al. 2023, "Overlap Communication with Dependent Computation via Decomposition in Large Deep Learning
Models".
"""

# With ``chunks`` > 1 the product is pipelined with it: the rows of the product (tokens) are computed in parts, whose
# communication overlaps with the products of the others. Every rank computes the same parts, with and without overlap,
# so that both give equal bits:
# - the all-gather of x along the sequence is a ring: the part of each rank is multiplied while the next one arrives;
# - the reduce-scatter of y has one part for each rank, which leaves while the next one is computed; each rank sums its
#   own;
# - the all-reduce of y has ``chunks`` parts, which are summed during the products of later ones.

from dataclasses import dataclass
from functools import cached_property, reduce
from operator import add

import torch
from torch import Tensor

from megatron_core.ops import linear, linear_into
from megatron_core.parallel.collectives import (
    all_reduce_,
    equal_parts,
    start_all_reduce,
    start_gather_sequence,
    start_reduce_scatter_sequence,
    start_ring_shift,
)
from megatron_core.parallel.groups import Group, LocalGroup
from megatron_core.parallel.handles import All, Done, Handle, SummedAfter


class SharedInput:
    """Sum of the gradients of an input that ``uses`` column-parallel layers share, so that they are reduced once.

    Backward calls ``add`` once for each of the layers, in any order.
    """

    def __init__(self, uses: int) -> None:
        self._uses = uses
        self._grads = list[Tensor]()

    def add(self, grad: Tensor) -> Tensor | None:
        """Return the sum if ``grad`` is the last one, else None."""
        self._grads.append(grad)
        if len(self._grads) < self._uses:
            return None
        # One sum after the last gradient has arrived; both parts of a layer then cost one collective instead of two.
        total = reduce(add, self._grads)
        self.clear()
        return total

    def clear(self) -> None:
        """Forget the gradients of a backward that did not finish."""
        # An exception between the backward passes of two layers would leave a gradient behind, to be added in the next
        # step.
        self._grads = []


@dataclass(frozen=True)
class LinearComm:
    """Communication of a linear layer over its tensor-parallel group."""

    group: Group
    gather_sequence: bool = False
    """The input is split along the sequence: all-gather it in forward, reduce-scatter its gradient in backward."""
    reduce_input_grad: bool = False
    """The input is replicated: sum its gradient over the group."""
    scatter_sequence: bool = False
    """The input features are split: reduce-scatter the output along the sequence in forward, all-gather its gradient in
    backward."""
    reduce_output: bool = False
    """The input features are split: sum the output over the group."""
    overlap: bool = True
    """Overlap communication with computation: the reduction of the input gradient with the weight gradient, and with
    ``chunks`` the parts of a product."""
    chunks: int = 1
    """Parts of a product that is pipelined with an all-reduce; more than 1 also pipelines gathers and
    reduce-scatters."""
    shared_input: SharedInput | None = None
    """Other layers have the same input, whose gradients are reduced together; not in graphs of torch.compile."""

    @property
    def options(self) -> list[int]:
        """The fields after ``group``, as integers."""
        flags = self.gather_sequence, self.reduce_input_grad, self.scatter_sequence, self.reduce_output, self.overlap
        return [*map(int, flags), self.chunks]

    @cached_property
    def is_local(self) -> bool:
        """Whether the layer exchanges nothing."""
        return self.group.size() == 1 and self.shared_input is None

    @cached_property
    def is_pipelined(self) -> bool:
        """Whether products are pipelined with their communication."""
        return self.chunks > 1 and self.group.size() > 1


NO_COMM = LinearComm(LocalGroup())


def gather_input(x: Tensor, comm: LinearComm) -> Tensor:
    """The input of the matrix product, gathered along the sequence if it is split."""
    return _gathered(x, comm) if comm.gather_sequence else x


def gather_output_grad(grad_y: Tensor, comm: LinearComm) -> Tensor:
    """The gradient of the product's output, gathered along the sequence if the output is split."""
    return _gathered(grad_y, comm) if comm.scatter_sequence else grad_y


def _gathered(x: Tensor, comm: LinearComm) -> Tensor:
    full, handle = start_gather_sequence(x, comm.group)
    handle.wait()
    return full


def reduced_output(y: Tensor, comm: LinearComm) -> Tensor:
    """The output from this rank's product, which may be overwritten: summed over the group if the inputs are split."""
    handle: Handle = Done()
    if comm.scatter_sequence:
        y, handle = start_reduce_scatter_sequence(y, comm.group)
    elif comm.reduce_output:
        y, handle = start_all_reduce(y, comm.group)
    handle.wait()
    return y


def start_input_grad_reduction(grad_x: Tensor, comm: LinearComm) -> tuple[Tensor | None, Handle]:
    """Start reducing the gradient of the gathered input over the group; it is split like the input.

    None: another layer with the same input reduces the sum of both gradients.
    """
    if comm.shared_input is not None:
        if (total := comm.shared_input.add(grad_x)) is None:
            return None, Done()
        grad_x = total
    if comm.gather_sequence:
        return start_reduce_scatter_sequence(grad_x, comm.group)
    if comm.reduce_input_grad:
        return start_all_reduce(grad_x, comm.group)
    return grad_x, Done()


# Pipelined products.


def pipelined_output(x: Tensor, weight: Tensor, bias: Tensor | None, comm: LinearComm) -> Tensor:
    """The layer's output, from its input on this rank; a layer with a bias has no reduction."""
    if comm.gather_sequence:
        return multiply_arriving(x, weight, bias, comm)[1]
    if comm.scatter_sequence or comm.reduce_output:
        y, handle = start_multiply_and_sum(x, weight, comm, scatter=comm.scatter_sequence)
        handle.wait()
        return y
    return linear(x, weight, bias)


def multiply_arriving(x: Tensor, matrix: Tensor, bias: Tensor | None, comm: LinearComm) -> tuple[Tensor, Tensor]:
    """x, gathered along the sequence, and y = x M^T + b: each part is multiplied while the next one arrives."""
    size = comm.group.size()
    rank = comm.group.rank()
    gathered = x.new_empty((len(x) * size, *x.shape[1:]))
    y = x.new_empty((*gathered.shape[:-1], len(matrix)))
    blocks = gathered.chunk(size)
    outputs = y.chunk(size)
    # The ring delivers the blocks of the other ranks into the same tensor, which ``of_weight`` reads as a whole.
    blocks[rank].copy_(x)
    for step in range(size):
        # A rank's own block first: it needs no message, and hides the arrival of the next one.
        owner = (rank - step) % size
        next_owner = (rank - step - 1) % size
        arriving: Handle = Done()
        if step + 1 < size:
            _, handle = start_ring_shift(blocks[owner], comm.group, out=blocks[next_owner])
            arriving = _overlapped(handle, comm)
        linear_into(outputs[owner], blocks[owner], matrix, bias)
        arriving.wait()
    return gathered, y


def start_multiply_and_sum(x: Tensor, matrix: Tensor, comm: LinearComm, *, scatter: bool) -> tuple[Tensor, Handle]:
    """y = x M^T, summed over the ranks; with ``scatter`` this rank's part along the sequence."""
    if scatter:
        return _start_multiply_and_scatter(x, matrix, comm)
    y = x.new_empty((*x.shape[:-1], len(matrix)))
    handles = []
    # Not more parts than tokens, as in generation.
    count = max(min(comm.chunks, len(x)), 1)
    for rows, output in zip(x.tensor_split(count), y.tensor_split(count), strict=True):
        linear_into(output, rows, matrix)
        handles.append(_overlapped(all_reduce_(output, comm.group, async_op=True), comm))
    return y, All(handles, y)


def _start_multiply_and_scatter(x: Tensor, matrix: Tensor, comm: LinearComm) -> tuple[Tensor, Handle]:
    """The products of the other ranks' parts leave one after the other; this rank's own is the last."""
    size = comm.group.size()
    rank = comm.group.rank()
    blocks = equal_parts(x, comm.group)
    handles = []
    received = x.new_empty((size, *blocks[0].shape[:-1], len(matrix)))
    # In the order of distance, so that in each step every rank sends to one rank and receives from one.
    for step in range(1, size):
        leaving = torch.empty_like(received[0])
        linear_into(leaving, blocks[(rank + step) % size], matrix)
        _, handle = start_ring_shift(leaving, comm.group, step=step, out=received[(rank - step) % size])
        handles.append(_overlapped(handle, comm))
    # Last, while the other products travel; this one does not leave.
    linear_into(received[rank], blocks[rank], matrix)
    total = torch.empty_like(received[0])
    return total, SummedAfter(All(handles, received), received, total.view(-1))


def _overlapped(handle: Handle, comm: LinearComm) -> Handle:
    """The handle; without overlap it is complete."""
    if comm.overlap:
        return handle
    handle.wait()
    return Done()
