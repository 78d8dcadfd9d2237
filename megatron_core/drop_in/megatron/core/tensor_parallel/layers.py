"""``megatron_core.tensor_parallel.layers`` at Megatron's path, and attributes of split parameters."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker, get_expert_parallel_rng_tracker_name
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.parallel.current import current, tensor_parallel_group
from megatron_core.parallel.groups import Group
from megatron_core.tensor_parallel.layers import *  # noqa: F403
from megatron_core.tensor_parallel.linear import parallel_linear
from megatron_core.tensor_parallel.linear_comm import LinearComm

_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


def linear_with_grad_accumulation_and_async_allreduce(
    input: Tensor,
    weight: nn.Parameter,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    grad_output_buffer: None = None,
    wgrad_deferral_limit: int | None = 0,
    tp_group: Group | None = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """The product of a column-parallel layer, y = x A^T + b.

    ``sequence_parallel`` gathers the input and reduce-scatters its gradient; ``allreduce_dgrad`` sums it over ranks.
    Gradients are added to ``weight.main_grad`` if it exists; ``gradient_accumulation_fusion`` has no effect.
    Errors: LayoutError for a ``grad_output_buffer``, ConfigError for another ``output_dtype`` than the input's.
    """
    if output_dtype not in (None, input.dtype):
        raise ConfigError(f"output_dtype={output_dtype} is not supported; pass input and weight in this dtype")
    if grad_output_buffer is not None:
        raise LayoutError("grad_output_buffer is not supported by parallel layers; omit it")
    comm = LinearComm(
        tensor_parallel_group(tp_group), gather_sequence=sequence_parallel, reduce_input_grad=allreduce_dgrad
    )
    return parallel_linear(input, weight, bias, comm)


def linear_with_frozen_weight(
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    gradient_accumulation_fusion: bool,
    allreduce_dgrad: bool,
    sequence_parallel: bool,
    tp_group: Group | None = None,
    grad_output_buffer: None = None,
    wgrad_deferral_limit: None = None,
) -> Tensor:
    """The same for a frozen weight: only the input gets a gradient."""
    # Another parameter: ``weight`` itself may have a main_grad, which a frozen weight must not change.
    frozen = nn.Parameter(weight.detach(), requires_grad=False)
    shift = None if bias is None else bias.detach()
    flags = (gradient_accumulation_fusion, allreduce_dgrad, sequence_parallel)
    return linear_with_grad_accumulation_and_async_allreduce(
        input, frozen, shift, *flags, grad_output_buffer, tp_group=tp_group
    )


def set_tensor_model_parallel_attributes(tensor: Tensor, is_parallel: bool, dim: int, stride: int) -> None:
    """Set the attributes of a tensor that has none of them."""
    if present := [name for name in _DEFAULTS if hasattr(tensor, name)]:
        raise LayoutError(f"the tensor already has {', '.join(present)}; set these attributes once")
    for name, value in zip(_DEFAULTS, (is_parallel, dim, stride), strict=True):
        setattr(tensor, name, value)


def set_defaults_if_not_set_tensor_model_parallel_attributes(tensor: Tensor) -> None:
    """Set missing attributes to those of an unsplit tensor."""
    for name, value in _DEFAULTS.items():
        setattr(tensor, name, getattr(tensor, name, value))


def set_attributes_of_specs(root: nn.Module) -> None:
    """Set Megatron's attributes of the engine's parameters in ``root``: the split over tensor-parallel ranks,
    ``allreduce=False`` and ``expert_tp`` for experts, which have data- and tensor-parallel ranks of their own, and
    ``shared`` for the copy of a tied weight on the last stage."""
    parameter: Any
    for parameter in root.parameters():
        spec = getattr(parameter, "shard_spec", None)
        if spec is None:
            continue
        for split in () if hasattr(parameter, "partition_dim") else spec.splits:
            if split.axis in ("tp", "etp"):
                set_tensor_model_parallel_attributes(parameter, True, split.dim, 1)
        if spec.replica_axes == ("edp",):
            parameter.allreduce, parameter.expert_tp = False, True
        if spec.tied:
            parameter.shared_embedding, parameter.shared = True, spec.is_copy


def copy_tensor_model_parallel_attributes(destination_tensor: Tensor, source_tensor: Tensor) -> None:
    """Copy the attributes that exist, also those of fused queries, keys and values."""
    for name in (*_DEFAULTS, "is_qkv", "qkv_split_shapes"):
        if hasattr(source_tensor, name):
            setattr(destination_tensor, name, getattr(source_tensor, name))


def param_is_not_tensor_parallel_duplicate(param: Any, tp_group: Any = None, expert_tp_group: Any = None) -> bool:
    """Whether this rank includes a parameter in a sum over tensor-parallel ranks.

    Every rank includes split parameters, and the first rank parameters that are not split. ``expert_tp_group`` is the
    group of parameters with ``allreduce=False``.
    """
    if getattr(param, "tensor_model_parallel", False):
        return True
    if not getattr(param, "allreduce", True) and expert_tp_group is not None:
        tp_group = expert_tp_group
    return bool((tp_group or current().group("tp")).rank() == 0)


def _initialize_affine_weight_gpu(
    weight: Tensor, init_method: Callable[[Tensor], Any], partition_dim: int, stride: int = 1, is_expert: bool = False
) -> None:
    set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    name = get_expert_parallel_rng_tracker_name() if is_expert else "model-parallel-rng"
    with get_cuda_rng_tracker().fork(name):
        init_method(weight)


def _initialize_affine_weight_cpu(
    weight: Tensor,
    output_size: int,
    input_size: int,
    per_partition_size: int,
    partition_dim: int,
    init_method: Callable[[Tensor], Any],
    stride: int = 1,
    return_master_weight: bool = False,
    *,
    params_dtype: torch.dtype = torch.float32,
    rank: int | None = None,
    world_size: int | None = None,
    skip_set_tensor_parallel_attributes: bool = False,
) -> Tensor | None:
    """Draw the whole weight on every rank, and copy this rank's part of each of ``stride`` fused matrices."""
    if not skip_set_tensor_parallel_attributes:
        set_tensor_model_parallel_attributes(weight, True, partition_dim, stride)
    group = current().group("tp")
    rank, size = group.rank() if rank is None else rank, group.size() if world_size is None else world_size
    whole = torch.empty(output_size, input_size)
    init_method(whole)
    whole = whole.to(params_dtype)
    parts = whole.split(per_partition_size // stride, dim=partition_dim)[rank::size]
    with torch.no_grad():
        weight.copy_(torch.cat(parts, dim=partition_dim))
    return whole if return_master_weight else None
