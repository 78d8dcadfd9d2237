"""Megatron's names of the collectives and their adjoints, by default over the current tensor-parallel group."""

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_core.parallel import collectives
from megatron_core.parallel.current import current, tensor_parallel_group
from megatron_core.parallel.groups import Group


def _gather_rows(x: Tensor, group: Group, sizes: Sequence[int] | None = None) -> Tensor:
    """Gather the rows of all ranks along dim 0; rank i has ``sizes[i]`` rows, by default equally many."""
    if sizes is None or group.size() == 1:
        return collectives.gather_from_sequence(x, group)
    # torch's all-gather needs equal sizes on all ranks.
    return collectives.all_to_all_rows(torch.cat([x] * group.size()), [len(x)] * group.size(), sizes, group)


def _sum_rows(x: Tensor, group: Group, sizes: Sequence[int] | None = None) -> Tensor:
    """Return this rank's part along dim 0 of the sum of ``x`` over the ranks; rank i gets ``sizes[i]`` rows."""
    if sizes is None or group.size() == 1:
        return collectives.reduce_scatter_to_sequence(x, group)
    length = sizes[group.rank()]
    rows = collectives.all_to_all_rows(x, sizes, [length] * group.size(), group)
    return rows.view(group.size(), length, *x.shape[1:]).sum(0)


class _Symbolic(torch.autograd.Function):
    @classmethod
    def symbolic(cls, graph: Any, input_: Tensor, *arguments: Any) -> Tensor:
        """Run ``forward`` without autograd."""
        return cls.forward(SimpleNamespace(), input_.detach(), *arguments)


def _function(name: str, there: Callable[..., Tensor], back: Callable[..., Tensor]) -> type[_Symbolic]:
    """Return an autograd function of an input and a group, which it keeps as ``ctx.group``."""

    def forward(ctx: Any, input_: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return there(input_, group)

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return back(grad_output, ctx.group), None

    return type(name, (_Symbolic,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


class _GatherFromSequenceParallelRegion(_Symbolic):
    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: Group,
        tensor_parallel_output_grad: bool = True,
        output_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        """Gather dim 0."""
        ctx.group = group
        ctx.tensor_parallel_output_grad = tensor_parallel_output_grad
        ctx.output_split_sizes = output_split_sizes
        ctx.use_global_buffer = use_global_buffer
        return _gather_rows(input_, group, output_split_sizes)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Reduce-scatter dim 0, or take this rank's rows."""
        sizes = ctx.output_split_sizes
        if ctx.tensor_parallel_output_grad:
            local_gradient = _sum_rows(grad_output, ctx.group, sizes)
        elif sizes is None:
            local_gradient = collectives.scatter_to_sequence(grad_output, ctx.group)
        else:
            local_gradient = grad_output.split(list(sizes))[ctx.group.rank()].contiguous()
        return local_gradient, None, None, None, None


class _ReduceScatterToSequenceParallelRegion(_Symbolic):
    @staticmethod
    def forward(
        ctx: Any,
        input_: Tensor,
        group: Group,
        input_split_sizes: Sequence[int] | None = None,
        use_global_buffer: bool = False,
    ) -> Tensor:
        """Reduce-scatter dim 0."""
        ctx.group = group
        ctx.input_split_sizes = input_split_sizes
        ctx.use_global_buffer = use_global_buffer
        return _sum_rows(input_, group, input_split_sizes)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Gather dim 0."""
        return _gather_rows(grad_output, ctx.group, ctx.input_split_sizes), None, None, None


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        group: Group,
        input: Tensor,
        output_split_sizes: Sequence[int] | None,
        input_split_sizes: Sequence[int] | None,
        use_nccl_stream: bool = False,
    ) -> Tensor:
        """Send rank i ``input_split_sizes[i]`` rows and receive ``output_split_sizes[i]``; None: equal parts."""
        even = [len(input) // group.size()] * group.size()
        sent = input_split_sizes or even
        received = output_split_sizes or even
        ctx.group = group
        ctx.sent = sent
        ctx.received = received
        return collectives.all_to_all_rows(input, sent, received, group)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        """Send the gradients back."""
        back = collectives.all_to_all_rows(grad_output.contiguous(), ctx.received, ctx.sent, ctx.group)
        return None, back, None, None, None


_copy, _reduce = collectives.copy_to_region, collectives.reduce_from_region
_split, _gather = collectives.scatter_channels, collectives.gather_channels
_gather_parts = partial(collectives.paired, name="gather_last", adjoint="reduce_scatter_last")
_scatter_sums = partial(collectives.paired, name="reduce_scatter_last", adjoint="gather_last")
_CopyToModelParallelRegion = _function("_CopyToModelParallelRegion", _copy, _reduce)
_ReduceFromModelParallelRegion = _function("_ReduceFromModelParallelRegion", _reduce, _copy)
_ScatterToModelParallelRegion = _function("_ScatterToModelParallelRegion", _split, _gather)
_GatherFromModelParallelRegion = _function("_GatherFromModelParallelRegion", _gather, _split)
_ScatterToSequenceParallelRegion = _function(
    "_ScatterToSequenceParallelRegion", collectives.scatter_to_sequence, collectives.gather_from_sequence
)
_AllGatherFromTensorParallelRegion = _function("_AllGatherFromTensorParallelRegion", _gather_parts, _scatter_sums)
_ReduceScatterToTensorParallelRegion = _function("_ReduceScatterToTensorParallelRegion", _scatter_sums, _gather_parts)


def _over_current(pair: Callable[[Tensor, Group], Tensor]) -> Callable[..., Tensor]:
    """The collective ``pair``, by default over the current tensor-parallel group."""

    def apply(input_: Tensor, group: Group | None = None) -> Tensor:
        return pair(input_, tensor_parallel_group(group))

    apply.__doc__ = pair.__doc__
    return apply


copy_to_tensor_model_parallel_region = _over_current(_copy)
reduce_from_tensor_model_parallel_region = _over_current(_reduce)
scatter_to_tensor_model_parallel_region = _over_current(_split)
gather_from_tensor_model_parallel_region = _over_current(_gather)
all_gather_last_dim_from_tensor_parallel_region = _over_current(_gather_parts)
reduce_scatter_last_dim_to_tensor_parallel_region = _over_current(_scatter_sums)
scatter_to_sequence_parallel_region = _over_current(collectives.scatter_to_sequence)


def gather_from_sequence_parallel_region(
    input_: Tensor,
    tensor_parallel_output_grad: bool = True,
    group: Group | None = None,
    output_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Gather dim 0; backward reduce-scatters, or splits if ``tensor_parallel_output_grad`` is False.

    Rank i has ``output_split_sizes[i]`` rows, by default equally many. ``use_global_buffer`` has no effect.
    """
    return _GatherFromSequenceParallelRegion.apply(
        input_, tensor_parallel_group(group), tensor_parallel_output_grad, output_split_sizes, use_global_buffer
    )


def reduce_scatter_to_sequence_parallel_region(
    input_: Tensor,
    group: Group | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_global_buffer: bool = False,
) -> Tensor:
    """Reduce-scatter dim 0; backward gathers. Rank i gets ``input_split_sizes[i]`` rows, by default equally many."""
    return _ReduceScatterToSequenceParallelRegion.apply(
        input_, tensor_parallel_group(group), input_split_sizes, use_global_buffer
    )


def gather_from_sequence_parallel_region_to_moe(input_: Tensor, use_global_buffer: bool = False) -> Tensor:
    """Gather dim 0 over the ranks that split a layer's experts; backward reduce-scatters."""
    return gather_from_sequence_parallel_region(input_, group=current().group("etp-ep"))


def reduce_scatter_to_sequence_parallel_region_from_moe(input_: Tensor, use_global_buffer: bool = False) -> Tensor:
    """Reduce-scatter dim 0 over the ranks that split a layer's experts; backward gathers."""
    return reduce_scatter_to_sequence_parallel_region(input_, current().group("etp-ep"))


def all_to_all(
    group: Group,
    input_: Tensor,
    output_split_sizes_: Sequence[int] | None = None,
    input_split_sizes: Sequence[int] | None = None,
    use_nccl_stream: bool = False,
) -> Tensor:
    """Send rank i ``input_split_sizes[i]`` rows and receive ``output_split_sizes_[i]``; None: equal parts. Backward
    sends the gradients back."""
    return _AllToAll.apply(group, input_, output_split_sizes_, input_split_sizes, use_nccl_stream)


def all_to_all_sp2hp(input_: Tensor, group: Group | None = None) -> Tensor:
    """``[n/tp, h]``, this rank's tokens -> ``[n, h/tp]``, all tokens."""
    members = tensor_parallel_group(group)
    rows = input_.reshape(-1, input_.shape[-1])
    return all_to_all(members, torch.cat(rows.chunk(members.size(), dim=1)))


def all_to_all_hp2sp(input_: Tensor, group: Group | None = None) -> Tensor:
    """``[n, h/tp]``, all tokens -> ``[n/tp, h]``, this rank's tokens."""
    members = tensor_parallel_group(group)
    rows = input_.reshape(-1, input_.shape[-1])
    return torch.cat(all_to_all(members, rows).chunk(members.size()), dim=-1)
