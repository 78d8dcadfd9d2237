"""``megatron_core.tensor_parallel.layers`` at Megatron's path, and attributes of split parameters."""

from typing import Any

from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.parallel.current import current
from megatron_core.tensor_parallel.layers import *  # noqa: F403

_DEFAULTS = {"tensor_model_parallel": False, "partition_dim": -1, "partition_stride": 1}


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
