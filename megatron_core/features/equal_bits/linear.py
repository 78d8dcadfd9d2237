"""y = x W^T + b and its gradients, with the same bits in every layout (``parallel.invariance``).

Shapes: S sequence, B batch, I input, O output features of this rank: x_SBI, weight_OI, y_SBO. Gradients of parameters
are added to ``main_grad`` in float64, without rounding.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import accumulate, pairwise

import torch
from torch import Tensor, nn

from megatron_core.errors import LayoutError
from megatron_core.features.equal_bits.exact_sum import add_rows_exactly_, rounded_exactly
from megatron_core.features.equal_bits.fixed_products import (
    ROWS,
    InnerRange,
    Tokens,
    add_chunk_products_,
    is_native,
    product_,
    sum_of_products_,
)
from megatron_core.features.equal_bits.invariance import Invariance, all_reduce_in_tree, reduce_scatter_in_tree
from megatron_core.features.equal_bits.rules import subtree_sizes
from megatron_core.features.experts.grouped_linear import Chunks
from megatron_core.parallel.collectives import start_gather_sequence
from megatron_core.parallel.sharding import Range, ShardSpec
from megatron_core.tensor_parallel.linear import defers_weight_grad, main_grad_of
from megatron_core.tensor_parallel.linear_comm import LinearComm, gather_input


@dataclass(frozen=True)
class WeightParts:
    """The canonical parts of this rank's weight along the dim that tensor-parallel ranks split."""

    invariance: Invariance
    runs: tuple[tuple[Range, ...], ...]
    """For each part, the ranges of local indices; several parts may contain the same range (keys and values)."""
    splits_output: bool
    """Whether the split dim is that of the output features, else of the input features."""
    rows: int = ROWS
    """Rows of each product of the forward pass and of input gradients."""

    @classmethod
    def of_output(cls, invariance: Invariance, spec: ShardSpec, whole_spec: ShardSpec) -> "WeightParts":
        """For rows split as ``spec``; ``whole_spec`` is the split over as many ranks as there are parts."""
        # ranges are those of matrices [O, I], or of a stack of them
        (held_split,) = spec.splits
        (whole_split,) = whole_spec.splits
        size = len(held_split.ranges)
        rank = dict(spec.indices)[held_split.axis]
        count = invariance.feature_parts // size
        if held_split.local_extent:  # padded: equal parts, padding included
            return cls.even(invariance, held_split.local_extent, count, splits_output=True)
        starts = []
        offset = 0
        for start, stop in held_split.ranges[rank]:
            starts.append((start, stop, offset))
            offset += stop - start
        runs = []
        for ranges in whole_split.ranges[rank * count : (rank + 1) * count]:
            local = []
            for start, stop in ranges:
                inside = [(first, begin) for first, run_end, begin in starts if first <= start and stop <= run_end]
                local.append((inside[0][1] + start - inside[0][0], inside[0][1] + stop - inside[0][0]))
            runs.append(tuple(local))
        return cls(invariance, tuple(runs), splits_output=True)

    @classmethod
    def even(cls, invariance: Invariance, extent: int, count: int, *, splits_output: bool) -> "WeightParts":
        """``count`` equal parts of ``extent`` local indices."""
        width = extent // count
        return cls(
            invariance, tuple(((i * width, (i + 1) * width),) for i in range(count)), splits_output=splits_output
        )

    @cached_property
    def columns(self) -> list[tuple[Range, Range]]:
        """For a split output: (rows of the weight, columns of the output) of each range of each part.

        They are equal, unless several parts contain the same rows: then the output has each part's columns in turn.
        """
        ranges = [run for ranges_of_part in self.runs for run in ranges_of_part]
        if len(set(ranges)) == len(ranges):
            return [(run, run) for run in ranges]
        ends = list(accumulate(stop - start for start, stop in ranges))
        return [(run, (end - run[1] + run[0], end)) for run, end in zip(ranges, ends, strict=True)]

    def runs_for(self, x: Tensor) -> list[tuple[Range, Range]]:
        """``columns`` for products of ``x``; neighbours are joined if the bits do not depend on the shapes."""
        return self._joined if is_native(x) else self.columns

    @cached_property
    def _joined(self) -> list[tuple[Range, Range]]:
        joined: list[tuple[Range, Range]] = []
        for rows, columns in self.columns:
            if joined and (rows[0], columns[0]) == (joined[-1][0][1], joined[-1][1][1]):
                (first, _), (begin, _) = joined.pop()
                rows, columns = (first, rows[1]), (begin, columns[1])
            joined.append((rows, columns))
        return joined

    @cached_property
    def width(self) -> int:
        """For a split output: its columns."""
        return max(stop for _, (_, stop) in self.columns)

    @cached_property
    def addends(self) -> tuple[InnerRange, ...]:
        """The addends of the sum over the split features, and the order of their sum: the ranges of a part in turn, and
        the tree over parts."""
        addends = []
        of_runs = iter(self.columns)
        for ranges_of_part, after in zip(self.runs, additions(len(self.runs)), strict=True):
            for number, (start, stop) in enumerate(ranges_of_part):
                column = next(of_runs)[1][0] if self.splits_output else start
                joins = after if number == len(ranges_of_part) - 1 else 0
                addends.append(InnerRange(column, start, stop - start, (number > 0) + joins))
        return tuple(addends)


def invariant_linear(
    x: Tensor, weight: nn.Parameter, bias: Tensor | None, comm: LinearComm, weight_parts: WeightParts
) -> Tensor:
    """``parallel_linear`` in the order of ``weight_parts``.

    A split input, without bias, gives this rank's subtree of the sum.

    With a split output, y has the columns of ``weight_parts.columns``.
    """
    return _InvariantLinear.apply(x, weight, bias, comm, weight_parts)


class _InvariantLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, comm, weight_parts):
        ctx.save_for_backward(x, weight)
        # After recomputation the saved tensors are others, without main_grad and grad_queue, so keep these.
        ctx.weight = weight
        ctx.bias = bias
        ctx.comm = comm
        ctx.parts = weight_parts
        x = gather_input(x, comm)
        y = outputs_of(x.reshape(-1, x.shape[-1]), weight.to(x.dtype), weight_parts)
        if bias is not None:
            for rows, columns in weight_parts.columns:
                y[:, slice(*columns)] += bias[slice(*rows)]
        return y.view(*x.shape[:-1], y.shape[-1])  # -1 would be ambiguous without rows

    @staticmethod
    def backward(ctx, grad_y):
        x, _ = ctx.saved_tensors
        weight = ctx.weight
        bias = ctx.bias
        comm = ctx.comm
        weight_parts = ctx.parts
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        flat = grad_y.reshape(-1, grad_y.shape[-1])
        if needs_bias:
            _add_bias_grad(bias, flat, weight_parts)
        if needs_weight:
            _compute_or_defer(weight, partial(_add_weight_grad, weight, x, grad_y, comm, weight_parts))
        grad_x = None
        if needs_x:
            grad_x = input_grads_of(flat, weight.to(flat.dtype), weight_parts)
            grad_x = _reduced(grad_x.view(*grad_y.shape[:-1], -1), comm)
        return grad_x, None, None, None, None


def _compute_or_defer(weight: nn.Parameter, job: Callable[[], None]) -> None:
    """Compute a weight's gradient now, or when the pipeline schedule asks for it."""
    if not defers_weight_grad(weight, job):
        job()


def outputs_of(x: Tensor, weight: Tensor, weight_parts: WeightParts) -> Tensor:
    """x W^T ``[R, O]``; with a split input, this rank's subtree of the sum over parts."""
    return (_by_parts if weight_parts.splits_output else _sum_over_parts)(x, weight.t(), weight_parts)


def input_grads_of(grad_y: Tensor, weight: Tensor, weight_parts: WeightParts) -> Tensor:
    """grad_y W ``[R, I]``; with a split output, this rank's subtree of the sum over parts."""
    return (_sum_over_parts if weight_parts.splits_output else _by_parts)(grad_y, weight, weight_parts)


def _by_parts(x: Tensor, matrix: Tensor, weight_parts: WeightParts) -> Tensor:
    """x matrix ``[R, N]``, if the parts split N."""
    y = x.new_empty(x.shape[0], weight_parts.width)
    done: dict[Range, Range] = {}
    for of_matrix, columns in weight_parts.runs_for(x):
        target = y[:, slice(*columns)]
        if of_matrix in done:
            target.copy_(y[:, slice(*done[of_matrix])])
        else:
            product_(target, x, matrix[:, slice(*of_matrix)], weight_parts.rows)
            done[of_matrix] = columns
    return y


def _sum_over_parts(x: Tensor, matrix: Tensor, weight_parts: WeightParts) -> Tensor:
    """x matrix ``[R, N]``, if the parts split the inner index."""
    y = x.new_empty(x.shape[0], matrix.shape[1])
    sum_of_products_(y, x, matrix, weight_parts.addends, weight_parts.rows)
    return y


def _reduced(grad_x: Tensor, comm: LinearComm) -> Tensor:
    if comm.gather_sequence:
        return reduce_scatter_in_tree(grad_x, comm.group)
    return all_reduce_in_tree(grad_x, comm.group) if comm.reduce_input_grad else grad_x


def _add_weight_grad(
    weight: nn.Parameter, x: Tensor, grad_y: Tensor, comm: LinearComm, weight_parts: WeightParts
) -> None:
    """Add the product of each chunk of each sequence to ``weight.main_grad``."""
    if comm.gather_sequence:
        x, gathering = start_gather_sequence(x, comm.group)
        gathering.wait()
    chunks = [(chunk, b) for chunk in weight_parts.invariance.chunks_of(x.shape[0]) for b in range(x.shape[1])]
    _add_products(exact_grad_of(weight), grad_y, x, chunks, weight_parts)


def _add_products(
    total: Tensor, grad_y: Tensor, x: Tensor, chunks: Sequence[Tokens], weight_parts: WeightParts
) -> None:
    """total_OI += grad_y_c^T x_c for each chunk c of grad_y_SBO and x_SBI, a product for each canonical part."""
    terms = weight_parts.invariance.products
    if weight_parts.splits_output:
        for rows, columns in weight_parts.runs_for(x):
            add_chunk_products_(total[slice(*rows)], grad_y[..., slice(*columns)], x, chunks, [slice(None)], terms)
    else:
        add_chunk_products_(total, grad_y, x, chunks, [slice(*run) for (run,) in weight_parts.runs], terms)


def _add_bias_grad(bias: nn.Parameter, grad_y: Tensor, weight_parts: WeightParts) -> None:
    total = exact_grad_of(bias)
    terms = weight_parts.invariance.tokens * weight_parts.invariance.feature_parts
    for rows, columns in weight_parts.columns:
        add_rows_exactly_(total[slice(*rows)], grad_y[:, slice(*columns)], terms)


def exact_grad_of(parameter: nn.Parameter) -> Tensor:
    """The float64 gradient of ``parameter`` to which exact sums are added; LayoutError if it has none."""
    total = main_grad_of(parameter)
    if total is None or total.dtype != torch.float64:
        raise LayoutError(
            "layout_invariant=True adds float64 gradients: pass DataParallelSettings(arithmetic=...) with the "
            "arithmetic of the layers to DataParallel"
        )
    return total


def add_bias(x: Tensor, bias: nn.Parameter, invariance: Invariance) -> Tensor:
    """x + bias over the last dim, with an exact sum for the gradient of ``bias``."""
    return _AddBias.apply(x, bias, invariance)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, invariance):
        ctx.bias = bias
        ctx.invariance = invariance
        return x + bias

    @staticmethod
    def backward(ctx, grad):
        if ctx.needs_input_grad[1]:
            add_rows_exactly_(exact_grad_of(ctx.bias), grad, ctx.invariance.tokens)
        return grad, None, None


def invariant_lookup(tokens: Tensor, weight: nn.Parameter, first: int, invariance: Invariance) -> Tensor:
    """``layers.vocab_parallel_lookup`` with exact sums for the gradient of the table."""
    return _Lookup.apply(tokens, weight, first, invariance)


class _Lookup(torch.autograd.Function):
    @staticmethod
    def forward(ctx, tokens, weight, first, invariance):
        elsewhere = (tokens < first) | (tokens >= first + weight.shape[0])
        local = (tokens - first).masked_fill(elsewhere, 0)
        ctx.weight = weight
        ctx.invariance = invariance
        ctx.save_for_backward(local, elsewhere)
        return nn.functional.embedding(local, weight).masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx, grad):
        local, elsewhere = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            addends = rounded_exactly(grad, ctx.invariance.tokens).masked_fill_(elsewhere.unsqueeze(-1), 0.0)
            exact_grad_of(ctx.weight).index_add_(0, local.flatten(), addends.flatten(0, -2))
        return None, None, None, None


def invariant_grouped_linear(x: Tensor, weight: nn.Parameter, chunks: Chunks, weight_parts: WeightParts) -> Tensor:
    """``grouped_linear`` in the order of ``weight_parts``: ``x`` ``[R, I]``, ``weight`` ``[E, O, I]`` -> ``[R, O]``."""
    return _InvariantGroupedLinear.apply(x, weight, chunks, weight_parts)


class _InvariantGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, chunks, weight_parts):
        ctx.save_for_backward(x, weight)
        ctx.weight = weight
        ctx.chunks = chunks
        ctx.parts = weight_parts
        y = x.new_zeros(x.shape[0], weight.shape[1])
        for rows, matrix in zip(chunks.experts, weight, strict=True):
            if rows.start < rows.stop:
                y[rows] = outputs_of(x[rows], matrix.to(x.dtype), weight_parts)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, _ = ctx.saved_tensors
        weight = ctx.weight
        chunks = ctx.chunks
        weight_parts = ctx.parts
        grad_y = grad_y.contiguous()
        if ctx.needs_input_grad[1]:
            _compute_or_defer(weight, partial(_add_expert_grads, weight, x, grad_y, chunks, weight_parts))
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.zeros_like(x)
            for rows, matrix in zip(chunks.experts, weight.detach(), strict=True):
                if rows.start < rows.stop:
                    grad_x[rows] = input_grads_of(grad_y[rows], matrix.to(grad_y.dtype), weight_parts)
        return grad_x, None, None, None


def _add_expert_grads(
    weight: nn.Parameter, x: Tensor, grad_y: Tensor, chunks: Chunks, weight_parts: WeightParts
) -> None:
    for of_expert, expert_grad in zip(chunks.of_expert, exact_grad_of(weight), strict=True):
        _add_products(expert_grad, grad_y.unsqueeze(1), x.unsqueeze(1), [(rows, 0) for rows in of_expert], weight_parts)


def additions(num_parts: int) -> list[int]:
    """For each part, the additions of the tree after it, if partial sums are put on a stack and each addition replaces
    the upper two by their sum."""
    sizes = subtree_sizes(num_parts)
    # A complete subtree is added to the sum of those before it in the same larger subtree, if there are any.
    return [
        sum(done % size == 0 and done % larger != size for size, larger in pairwise(sizes))
        for done in range(1, num_parts + 1)
    ]
