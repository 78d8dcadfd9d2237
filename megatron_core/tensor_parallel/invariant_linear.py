"""y = x W^T + b and its gradients, with the same bits in every layout (``parallel.invariance``).

Shapes: S sequence, B batch, I input, O output features of this rank: x_SBI, weight_OI, y_SBO. Gradients of parameters
are added to ``main_grad`` in float64, without rounding.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial, reduce
from itertools import accumulate

import torch
from torch import Tensor, nn

from megatron_core.errors import LayoutError
from megatron_core.ops.exact_sum import add_exactly_, add_rows_exactly_, exact
from megatron_core.ops.fixed_products import ROWS, chunk_product, product_, product_of_parts
from megatron_core.parallel.collectives import start_gather_sequence
from megatron_core.parallel.invariance import Invariance, all_reduce_in_tree, reduce_scatter_in_tree, tree_sum
from megatron_core.parallel.sharding import Range, ShardSpec
from megatron_core.tensor_parallel.linear import LinearComm, gather_input, main_grad_of


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
    def of_output(cls, invariance: Invariance, own: ShardSpec, whole: ShardSpec) -> WeightParts:
        """For rows split as ``own``; ``whole`` is the split over as many ranks as there are parts."""
        (held,), (parts,) = own.splits, whole.splits  # ranges are those of matrices [O, I], or of a stack of them
        size, rank = len(held.ranges), dict(own.indices)[held.axis]
        count = invariance.parts // size
        if held.local_extent:  # padded: equal parts, padding included
            return cls.even(invariance, held.local_extent, count, splits_output=True)
        starts, at = [], 0
        for start, stop in held.ranges[rank]:
            starts.append((start, stop, at))
            at += stop - start
        runs = []
        for ranges in parts.ranges[rank * count : (rank + 1) * count]:
            local = []
            for start, stop in ranges:
                inside = [(first, begin) for first, last, begin in starts if first <= start and stop <= last]
                local.append((inside[0][1] + start - inside[0][0], inside[0][1] + stop - inside[0][0]))
            runs.append(tuple(local))
        return cls(invariance, tuple(runs), splits_output=True)

    @classmethod
    def even(cls, invariance: Invariance, extent: int, count: int, *, splits_output: bool) -> WeightParts:
        """``count`` equal parts of ``extent`` local indices."""
        part = extent // count
        return cls(invariance, tuple(((i * part, (i + 1) * part),) for i in range(count)), splits_output=splits_output)

    @cached_property
    def columns(self) -> list[tuple[Range, Range]]:
        """For a split output: (rows of the weight, columns of the output) of each range of each part.

        They are equal, unless several parts contain the same rows: then the output has each part's columns in turn.
        """
        ranges = [run for part in self.runs for run in part]
        if len(set(ranges)) == len(ranges):
            return [(run, run) for run in ranges]
        ends = list(accumulate(stop - start for start, stop in ranges))
        return [(run, (end - run[1] + run[0], end)) for run, end in zip(ranges, ends, strict=True)]

    @cached_property
    def width(self) -> int:
        """For a split output: its columns."""
        return max(stop for _, (_, stop) in self.columns)


def invariant_linear(
    x: Tensor, weight: nn.Parameter, bias: Tensor | None, comm: LinearComm, parts: WeightParts
) -> Tensor:
    """``parallel_linear`` in the order of ``parts``; a split input, without bias, gives this rank's subtree of the sum.

    With a split output, y has the columns of ``parts.columns``.
    """
    return _InvariantLinear.apply(x, weight, bias, comm, parts)


class _InvariantLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, comm, parts):
        ctx.save_for_backward(x, weight)
        # After recomputation the saved tensors are others, without main_grad and grad_queue, so keep these.
        ctx.weight, ctx.bias, ctx.comm, ctx.parts = weight, bias, comm, parts
        x = gather_input(x, comm)
        y = outputs_of(x.reshape(-1, x.shape[-1]), weight.to(x.dtype), parts)
        if bias is not None:
            for rows, columns in parts.columns:
                y[:, slice(*columns)] += bias[slice(*rows)]
        return y.view(*x.shape[:-1], y.shape[-1])  # -1 would be ambiguous without rows

    @staticmethod
    def backward(ctx, grad_y):
        x, _ = ctx.saved_tensors
        weight, bias, comm, parts = ctx.weight, ctx.bias, ctx.comm, ctx.parts
        needs_x, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        flat = grad_y.reshape(-1, grad_y.shape[-1])
        if needs_bias:
            _add_bias_grad(bias, flat, parts)
        if needs_weight:
            queue = getattr(weight, "grad_queue", None)
            job = partial(_add_weight_grad, weight, x, grad_y, comm, parts)
            if queue is not None and queue.is_collecting:
                queue.put(job)
            else:
                job()
        grad_x = None
        if needs_x:
            grad_x = input_grads_of(flat, weight.to(flat.dtype), parts)
            grad_x = _reduced(grad_x.view(*grad_y.shape[:-1], -1), comm)
        return grad_x, None, None, None, None


def outputs_of(x: Tensor, weight: Tensor, parts: WeightParts) -> Tensor:
    """x W^T ``[R, O]``; with a split input, this rank's subtree of the sum over parts."""
    return (_outputs if parts.splits_output else _sum_over_inputs)(x, weight, parts)


def input_grads_of(grad_y: Tensor, weight: Tensor, parts: WeightParts) -> Tensor:
    """grad_y W ``[R, I]``; with a split output, this rank's subtree of the sum over parts."""
    return (_sum_over_outputs if parts.splits_output else _input_grads)(grad_y, weight, parts)


def _outputs(x: Tensor, weight: Tensor, parts: WeightParts) -> Tensor:
    y = x.new_empty(x.shape[0], parts.width)
    done: dict[Range, Range] = {}
    for rows, columns in parts.columns:
        target = y[:, slice(*columns)]
        if rows in done:
            target.copy_(y[:, slice(*done[rows])])
        else:
            product_(target, x, weight[slice(*rows)].t(), parts.rows)
            done[rows] = columns
    return y


def _sum_over_inputs(x: Tensor, weight: Tensor, parts: WeightParts) -> Tensor:
    own = [slice(*run) for (run,) in parts.runs]
    return product_of_parts(
        [(x[:, at], weight[:, at].t()) for at in own], partial(tree_sum, add=Tensor.add_), parts.rows
    )


def _sum_over_outputs(grad_y: Tensor, weight: Tensor, parts: WeightParts) -> Tensor:
    """The gradient of the input: the sum over the ranges of a part, then the tree over parts."""
    lengths = [len(part) for part in parts.runs]

    def join(sums: list[Tensor]) -> Tensor:
        of_ranges = iter(sums)
        of_parts = [reduce(Tensor.add_, [next(of_ranges) for _ in range(length)]) for length in lengths]
        return tree_sum(of_parts, Tensor.add_)

    pairs = [(grad_y[:, slice(*columns)], weight[slice(*rows)]) for rows, columns in parts.columns]
    return product_of_parts(pairs, join, parts.rows)


def _input_grads(grad_y: Tensor, weight: Tensor, parts: WeightParts) -> Tensor:
    grad_x = grad_y.new_empty(grad_y.shape[0], weight.shape[1])
    for (run,) in parts.runs:
        product_(grad_x[:, slice(*run)], grad_y, weight[:, slice(*run)], parts.rows)
    return grad_x


def _reduced(grad_x: Tensor, comm: LinearComm) -> Tensor:
    if comm.gather_sequence:
        return reduce_scatter_in_tree(grad_x, comm.group)
    return all_reduce_in_tree(grad_x, comm.group) if comm.reduce_input_grad else grad_x


def _add_weight_grad(weight: nn.Parameter, x: Tensor, grad_y: Tensor, comm: LinearComm, parts: WeightParts) -> None:
    """Add the product of each chunk of each sequence to ``weight.main_grad``."""
    if comm.gather_sequence:
        x, gathering = start_gather_sequence(x, comm.group)
        gathering.wait()
    total, invariance = exact_grad_of(weight), parts.invariance
    wide = torch.promote_types(x.dtype, torch.float32)
    x, grad_y = x.to(wide), grad_y.to(wide)
    for chunk in invariance.chunks_of(x.shape[0]):
        for sample in range(x.shape[1]):
            add_chunk_grads_(total, grad_y[chunk, sample], x[chunk, sample], parts)


def add_chunk_grads_(total: Tensor, grad_y: Tensor, x: Tensor, parts: WeightParts) -> None:
    """total_OI += grad_y_TO^T x_TI, one product for each canonical part."""
    terms = parts.invariance.products
    if parts.splits_output:
        for rows, columns in parts.columns:
            add_exactly_(total[slice(*rows)], chunk_product(grad_y[:, slice(*columns)], x), terms)
    else:
        for (run,) in parts.runs:
            add_exactly_(total[:, slice(*run)], chunk_product(grad_y, x[:, slice(*run)]), terms)


def _add_bias_grad(bias: nn.Parameter, grad_y: Tensor, parts: WeightParts) -> None:
    total, terms = exact_grad_of(bias), parts.invariance.tokens * parts.invariance.parts
    for rows, columns in parts.columns:
        add_rows_exactly_(total[slice(*rows)], grad_y[:, slice(*columns)], terms)


def exact_grad_of(parameter: nn.Parameter) -> Tensor:
    """The float64 gradient of ``parameter`` to which exact sums are added; LayoutError if it has none."""
    total = main_grad_of(parameter)
    if total is None or total.dtype != torch.float64:
        raise LayoutError(
            "layout_invariant=True adds gradients in float64: wrap the model in DataParallel(exact_sums=True)"
        )
    return total


def add_bias(x: Tensor, bias: nn.Parameter, invariance: Invariance) -> Tensor:
    """x + bias over the last dim, with an exact sum for the gradient of ``bias``."""
    return _AddBias.apply(x, bias, invariance)


class _AddBias(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, bias, invariance):
        ctx.bias, ctx.invariance = bias, invariance
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
        ctx.weight, ctx.invariance = weight, invariance
        ctx.save_for_backward(local, elsewhere)
        return nn.functional.embedding(local, weight).masked_fill_(elsewhere.unsqueeze(-1), 0.0)

    @staticmethod
    def backward(ctx, grad):
        local, elsewhere = ctx.saved_tensors
        if ctx.needs_input_grad[1]:
            addends = exact(grad, ctx.invariance.tokens).masked_fill_(elsewhere.unsqueeze(-1), 0.0)
            exact_grad_of(ctx.weight).index_add_(0, local.flatten(), addends.flatten(0, -2))
        return None, None, None, None


@dataclass(frozen=True)
class Chunks:
    """The rows of each expert in chunks of sequences: rows are ordered by expert, sequence and position."""

    experts: tuple[slice, ...]
    """The rows of each expert."""
    of_expert: tuple[tuple[slice, ...], ...]
    """For each expert, the rows of each chunk of a sequence that has any."""


def invariant_grouped_linear(x: Tensor, weight: nn.Parameter, chunks: Chunks, parts: WeightParts) -> Tensor:
    """``grouped_linear`` in the order of ``parts``: ``x`` ``[R, I]``, ``weight`` ``[E, O, I]`` -> ``[R, O]``."""
    return _InvariantGroupedLinear.apply(x, weight, chunks, parts)


class _InvariantGroupedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, chunks, parts):
        ctx.save_for_backward(x, weight)
        ctx.weight, ctx.chunks, ctx.parts = weight, chunks, parts
        y = x.new_zeros(x.shape[0], weight.shape[1])
        for rows, matrix in zip(chunks.experts, weight, strict=True):
            if rows.start < rows.stop:
                y[rows] = outputs_of(x[rows], matrix, parts)
        return y

    @staticmethod
    def backward(ctx, grad_y):
        x, _ = ctx.saved_tensors
        weight, chunks, parts, grad_y = ctx.weight, ctx.chunks, ctx.parts, grad_y.contiguous()
        if ctx.needs_input_grad[1]:
            queue = getattr(weight, "grad_queue", None)
            job = partial(_add_expert_grads, weight, x, grad_y, chunks, parts)
            if queue is not None and queue.is_collecting:
                queue.put(job)
            else:
                job()
        grad_x = None
        if ctx.needs_input_grad[0]:
            grad_x = torch.zeros_like(x)
            for rows, matrix in zip(chunks.experts, weight.detach(), strict=True):
                if rows.start < rows.stop:
                    grad_x[rows] = input_grads_of(grad_y[rows], matrix, parts)
        return grad_x, None, None, None


def _add_expert_grads(weight: nn.Parameter, x: Tensor, grad_y: Tensor, chunks: Chunks, parts: WeightParts) -> None:
    total, wide = exact_grad_of(weight), torch.promote_types(x.dtype, torch.float32)
    x, grad_y = x.to(wide), grad_y.to(wide)
    for of_expert, own in zip(chunks.of_expert, total, strict=True):
        for rows in of_expert:
            add_chunk_grads_(own, grad_y[rows], x[rows], parts)
