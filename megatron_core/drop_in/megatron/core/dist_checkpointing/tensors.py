"""Tensors of the caller's modules as parts of global tensors."""

from typing import Any

from torch import Tensor

from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron_core.errors import ConfigError
from megatron_core.parallel.current import current
from megatron_core.parallel.groups import Group


def make_tp_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    tp_axis: int = 0,
    replica_id: Any = None,
    prepend_offsets: tuple[Any, ...] = (),
    allow_shape_mismatch: bool = False,
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
) -> ShardedTensor:
    """Return a tensor that is split evenly along ``tp_axis`` over the tensor-parallel ranks."""
    tp, dp = _groups(prepend_offsets, tp_group, dp_cp_group)
    part = (tp_axis, tp.rank(), tp.size())
    copy = (0, dp.rank()) if replica_id is None else replica_id
    found = ShardedTensor.from_rank_offsets(key, tensor, part, replica_id=copy)
    found.allow_shape_mismatch = allow_shape_mismatch
    return found


def make_sharded_tensor_for_checkpoint(
    tensor: Tensor,
    key: str,
    prepend_offsets: tuple[Any, ...] = (),
    replica_id: Any = None,
    tp_group: Group | None = None,
    dp_cp_group: Group | None = None,
) -> ShardedTensor:
    """Return a tensor that is whole on every rank."""
    tp, dp = _groups(prepend_offsets, tp_group, dp_cp_group)
    copy = (tp.rank(), dp.rank()) if replica_id is None else replica_id
    return ShardedTensor.from_rank_offsets(key, tensor, replica_id=copy)


def _groups(offsets: tuple[Any, ...], tp: Group | None, dp: Group | None) -> tuple[Group, Group]:
    """Return the given groups, or those of the current layout; ConfigError for prepended offsets."""
    if offsets:
        raise ConfigError(f"prepend_offsets={offsets} is not supported; give every layer its own name")
    return tp or current().group("tp"), dp or current().group("dp-cp")
