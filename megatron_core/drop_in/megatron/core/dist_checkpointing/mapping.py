"""What a sharded state dict consists of."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from megatron_core.errors import CheckpointError
from megatron_core.parallel.sharded_tensor import ShardedTensor

ShardedStateDict = dict[str, Any]


class LocalNonpersistentObject:
    """An object that is not saved; loading puts it back as it is."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """The object."""
        return self.obj


@dataclass
class ShardedObject:
    """One of the JSON values that together are a global object: which one, of how many along each dimension.

    ``replica_id`` is 0, or zeros, on the rank that saves it.
    """

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        """CheckpointError where offset and shape have other numbers of dimensions."""
        if len(self.global_shape) != len(self.global_offset):
            raise CheckpointError(
                f"{self.key}: global_offset={self.global_offset} needs as many numbers as global_shape="
                f"{self.global_shape}"
            )

    @property
    def unique_key(self) -> str:
        """The key with offset and shape: ``KEY/shard_0.1_2.2``."""
        numbers = (".".join(map(str, each)) for each in (self.global_offset, self.global_shape))
        return f"{self.key}/shard_{'_'.join(numbers)}"


@dataclass
class ShardedTensorFactory:
    """A tensor that is stored as something else: ``build_fn(key, data, replica_id, flattened_range)``, a sharded state
    dict; ``merge_fn`` makes the tensor of what was loaded of it."""

    key: str
    data: Tensor
    build_fn: Callable[[str, Tensor, Any, slice | None], Any]
    merge_fn: Callable[[Any], Tensor]
    replica_id: int | tuple[int, ...] = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        """What is stored."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


def built(state_dict: Any) -> Any:
    """A copy of nested dicts and lists in which factories have become what they build."""
    if isinstance(state_dict, ShardedTensorFactory):
        return state_dict.build()
    if isinstance(state_dict, list | tuple):
        return [built(value) for value in state_dict]
    return {k: built(v) for k, v in state_dict.items()} if isinstance(state_dict, dict) else state_dict


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace factories by what they build, in place."""
    sharded_state_dict.update(built(sharded_state_dict))


def apply_factory_merges(x1: Any, x2: Any, key: tuple[Any, ...] = ()) -> Any:
    """``x1``, which was loaded, with the tensors that the factories in ``x2`` make of their parts of it."""
    if isinstance(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)
    if not _holds_factory(x2):
        return x1
    if isinstance(x2, list | tuple):
        return [apply_factory_merges(a, b, (*key, i)) for i, (a, b) in enumerate(zip(x1, x2, strict=True))]
    if missing := [name for name in x2 if name not in x1]:
        raise CheckpointError(f"what was loaded has no {'.'.join(map(str, (*key, missing[0])))}")
    return x1 | {name: apply_factory_merges(x1[name], value, (*key, name)) for name, value in x2.items()}


def _holds_factory(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, ShardedTensorFactory) or any(map(_holds_factory, inside))


def is_main_replica(replica_id: int | tuple[int, ...]) -> bool:
    """Whether the number, or all of several, is 0."""
    return not any(replica_id) if isinstance(replica_id, tuple) else replica_id == 0
