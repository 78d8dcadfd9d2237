"""Megatron Core's names for the collective pairs, over the current tensor-parallel group unless another is given."""

from torch import Tensor

from megatron_core.parallel import collectives
from megatron_core.parallel.current import tensor_parallel_group
from megatron_core.parallel.groups import Group


def copy_to_tensor_model_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Identity; backward all-reduces."""
    return collectives.copy_to_region(input_, tensor_parallel_group(group))


def reduce_from_tensor_model_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """All-reduce; backward is the identity."""
    return collectives.reduce_from_region(input_, tensor_parallel_group(group))


def scatter_to_tensor_model_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Split the last dim; backward gathers."""
    return collectives.scatter_channels(input_, tensor_parallel_group(group))


def gather_from_tensor_model_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Gather the last dim; backward splits."""
    return collectives.gather_channels(input_, tensor_parallel_group(group))


def all_gather_last_dim_from_tensor_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Gather the last dim; backward reduce-scatters."""
    return collectives.gather_partial_channels(input_, tensor_parallel_group(group))


def reduce_scatter_last_dim_to_tensor_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Reduce-scatter the last dim; backward gathers."""
    return collectives.reduce_scatter_to_channels(input_, tensor_parallel_group(group))


def scatter_to_sequence_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Split dim 0; backward gathers."""
    return collectives.scatter_to_sequence(input_, tensor_parallel_group(group))


def gather_from_sequence_parallel_region(
    input_: Tensor, tensor_parallel_output_grad: bool = True, group: Group | None = None
) -> Tensor:
    """Gather dim 0; backward reduce-scatters, or splits if ``tensor_parallel_output_grad`` is False."""
    return collectives.gather_from_sequence(
        input_, tensor_parallel_group(group), partial_grad=tensor_parallel_output_grad
    )


def reduce_scatter_to_sequence_parallel_region(input_: Tensor, group: Group | None = None) -> Tensor:
    """Reduce-scatter dim 0; backward gathers."""
    return collectives.reduce_scatter_to_sequence(input_, tensor_parallel_group(group))
