"""``megatron_core.tensor_parallel.mappings`` at Megatron's path, and Megatron's autograd functions."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from megatron_core.parallel import collectives
from megatron_core.parallel.groups import Group
from megatron_core.tensor_parallel.mappings import *  # noqa: F403
from megatron_core.tensor_parallel.mappings import _AllToAll
from megatron_core.tensor_parallel.mappings import _GatherFromSequenceParallelRegion as _GatherRows
from megatron_core.tensor_parallel.mappings import _ReduceScatterToSequenceParallelRegion as _ReduceScatterRows


class _Symbolic(torch.autograd.Function):
    @classmethod
    def symbolic(cls, graph: Any, input_: Tensor, *arguments: Any) -> Tensor:
        """Run ``forward`` without autograd."""
        output: Tensor = cls.forward(SimpleNamespace(), input_.detach(), *arguments)
        return output


def _function(name: str, there: Callable[..., Tensor], back: Callable[..., Tensor]) -> type[_Symbolic]:
    """Return an autograd function of an input and a group, which it keeps as ``ctx.group``."""

    def forward(ctx: Any, input_: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return there(input_, group)

    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor, None]:
        return back(grad_output, ctx.group), None

    return type(name, (_Symbolic,), {"forward": staticmethod(forward), "backward": staticmethod(backward)})


class _GatherFromSequenceParallelRegion(_Symbolic, _GatherRows):
    pass


class _ReduceScatterToSequenceParallelRegion(_Symbolic, _ReduceScatterRows):
    pass


_copy, _reduce = collectives.copy_to_region, collectives.reduce_from_region
_split, _gather = collectives.scatter_channels, collectives.gather_channels
_gather_parts, _scatter_sums = collectives.gather_partial_channels, collectives.reduce_scatter_to_channels
_CopyToModelParallelRegion = _function("_CopyToModelParallelRegion", _copy, _reduce)
_ReduceFromModelParallelRegion = _function("_ReduceFromModelParallelRegion", _reduce, _copy)
_ScatterToModelParallelRegion = _function("_ScatterToModelParallelRegion", _split, _gather)
_GatherFromModelParallelRegion = _function("_GatherFromModelParallelRegion", _gather, _split)
_ScatterToSequenceParallelRegion = _function(
    "_ScatterToSequenceParallelRegion", collectives.scatter_to_sequence, collectives.gather_from_sequence
)
_AllGatherFromTensorParallelRegion = _function("_AllGatherFromTensorParallelRegion", _gather_parts, _scatter_sums)
_ReduceScatterToTensorParallelRegion = _function("_ReduceScatterToTensorParallelRegion", _scatter_sums, _gather_parts)
