"""The parts of a sharded state dict."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import CheckpointError, LayoutError
from megatron_core.parallel.sharding import ShardSpec, Split, spec_of

ShardedStateDict = dict[str, Any]
ReplicaId = int | tuple[int, ...]


def is_main_replica(replica_id: ReplicaId) -> bool:
    """Whether the number is 0, or all numbers of a tuple."""
    return not any(replica_id) if isinstance(replica_id, tuple) else replica_id == 0


@dataclass
class ShardedTensor:
    """This rank's part ``data`` of the global tensor that checkpoints store as ``key``: a view of a ``ShardSpec``.

    ``global_shape``, ``global_offset`` and ``axis_fragmentations`` describe an even part, as in Megatron Core. Only
    ``spec`` describes a part of several pieces (fused matrices).
    """

    key: str
    data: Tensor
    spec: ShardSpec
    replica_id: int | tuple[int, ...] = 0
    """0, or zeros, on the rank that saves the part; other numbers for copies on other data-parallel ranks."""
    allow_shape_mismatch: bool = False
    flattened: tuple[tuple[int, ...], int, int] | None = None
    """(shape, first, stop) if ``data`` has the elements first ... stop - 1 of a flattened tensor of this shape."""
    prepended: int = 0
    """Number of leading dimensions of size 1 that the caller's tensor lacks."""

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of ``data``."""
        return self.data.dtype

    @property
    def local_shape(self) -> tuple[int, ...]:
        """The shape of ``data``; assigning another one raises CheckpointError, as other offsets do."""
        return tuple(self.data.shape)

    @local_shape.setter
    def local_shape(self, shape: Sequence[int]) -> None:
        """Raise CheckpointError for another shape."""
        self._check("local_shape", shape)

    def _check(self, name: str, value: Sequence[int]) -> None:
        if tuple(value) != getattr(self, name):
            raise CheckpointError(
                f"{self.key}: {name}={tuple(value)} differs from {getattr(self, name)}; build another ShardedTensor"
            )

    @property
    def global_shape(self) -> tuple[int, ...]:
        """The shape of the global tensor."""
        return self.spec.global_shape

    @property
    def global_offset(self) -> tuple[int, ...]:
        """The position of the part's first element in the global tensor."""
        parts = self.spec.parts
        return parts[0].whole.start if parts else (0,) * len(self.global_shape)

    @global_offset.setter
    def global_offset(self, offset: Sequence[int]) -> None:
        """Raise CheckpointError for another offset."""
        self._check("global_offset", offset)

    @property
    def axis_fragmentations(self) -> tuple[int, ...]:
        """The number of parts along each dimension."""
        counts = [1] * len(self.global_shape)
        for split in self.spec.splits:
            counts[split.dim] *= len(split.ranges)
        return tuple(counts)

    @property
    def is_main_replica(self) -> bool:
        """Whether this rank saves the part."""
        return is_main_replica(self.replica_id)

    @classmethod
    def of(cls, key: str, tensor: Tensor) -> "ShardedTensor":
        """Return a parameter with its ``ShardSpec``; a tensor without one is whole on every rank."""
        return cls(key, tensor.detach(), spec_of(tensor))  # type: ignore[arg-type]

    @classmethod
    def from_rank_offsets(
        cls,
        key: str,
        data: Tensor,
        *rank_offsets: tuple[int, int, int],
        replica_id: int | tuple[int, ...] = 0,
        prepend_axis_num: int = 0,
        flattened_range: None = None,
        allow_shape_mismatch: bool = False,
    ) -> "ShardedTensor":
        """Return an even part; ``rank_offsets`` are triples (dimension, index of this part, number of equal parts).

        ``prepend_axis_num`` dimensions precede those of ``data``, such as the number of a layer. This rank has one
        element of each. Dimensions are counted with these.
        """
        if flattened_range is not None:
            raise LayoutError(f"{key}: flattened_range={flattened_range} is not supported; remove it")
        data = data.view((1,) * prepend_axis_num + tuple(data.shape))
        shape, splits, indices = list(data.shape), [], []
        for dim, index, count in rank_offsets:
            if not 0 <= index < count:
                raise LayoutError(f"{key}: part {index} of {count} along dim {dim} does not exist")
            extent = shape[dim]
            shape[dim] = extent * count
            ranges = tuple(((i * extent, (i + 1) * extent),) for i in range(count))
            splits.append(Split(dim, f"dim{dim}", ranges))
            indices.append((f"dim{dim}", index))
        spec = ShardSpec(tuple(shape), tuple(splits), tuple(indices))
        return cls(key, data, spec, replica_id, allow_shape_mismatch, prepended=prepend_axis_num)

    def rank_offsets(self) -> list[tuple[int, int, int]]:
        """Return (dimension, index of this part, number of parts) of each split, for ``from_rank_offsets``."""
        counts, parts = self.axis_fragmentations, dict(self.spec.indices)
        return [(split.dim, parts[split.axis], counts[split.dim]) for split in self.spec.splits]

    def narrow(self, dim: int, start: int, length: int) -> "list[ShardedTensor]":
        """Return a list with this rank's part of the global tensor whose parts are all narrowed in this way."""
        data = self.data.narrow(dim, start, length)
        return [ShardedTensor.from_rank_offsets(self.key, data, *self.rank_offsets(), replica_id=self.replica_id)]

    def validate_metadata_integrity(self) -> None:
        """Raise LayoutError unless ``data`` has the shape of ``spec``."""
        if self.flattened is None and self.local_shape != self.spec.local_shape:
            raise LayoutError(f"{self.key} has the shape {self.local_shape}, but its spec has {self.spec.local_shape}")


class LocalNonpersistentObject:
    """An object that is not saved; loading returns it unchanged."""

    def __init__(self, obj: Any) -> None:
        self.obj = obj

    def unwrap(self) -> Any:
        """Return the object."""
        return self.obj


@dataclass
class ShardedObject:
    """One JSON value of an array of values: its index ``global_offset`` in an array of shape ``global_shape``.

    ``replica_id`` is 0, or zeros, on the rank that saves it.
    """

    key: str
    data: Any
    global_shape: tuple[int, ...]
    global_offset: tuple[int, ...]
    replica_id: int | tuple[int, ...] = 0

    def __post_init__(self) -> None:
        """Raise CheckpointError unless offset and shape have equally many dimensions."""
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
    """A tensor that is stored as the sharded state dict ``build_fn(key, data, replica_id, flattened_range)``.

    ``merge_fn`` converts the loaded state dict to the tensor.
    """

    key: str
    data: Tensor
    build_fn: Callable[[str, Tensor, Any, slice | None], Any]
    merge_fn: Callable[[Any], Tensor]
    replica_id: int | tuple[int, ...] = 0
    flattened_range: slice | None = None

    def build(self) -> Any:
        """Return the sharded state dict that is stored."""
        return self.build_fn(self.key, self.data, self.replica_id, self.flattened_range)


def _split_factory(
    whole: ShardedTensor, dim: int, lengths: Sequence[int], stored: Sequence[tuple[str, list[tuple[int, int, int]]]]
) -> ShardedTensorFactory:
    """Return a factory that stores parts of ``lengths`` along ``dim``, with a suffix of the key and offsets for each.

    ``dim`` counts the leading dimensions that the caller's tensor lacks.
    """
    shape = tuple(whole.data.shape)

    def build(key: str, data: Tensor, replica_id: ReplicaId, flattened_range: slice | None) -> list[ShardedTensor]:
        return [
            ShardedTensor.from_rank_offsets(key + suffix, part, *offsets, replica_id=replica_id)
            for part, (suffix, offsets) in zip(data.detach().view(shape).split(list(lengths), dim), stored, strict=True)
        ]

    return ShardedTensorFactory(
        *(whole.key, whole.data, build, lambda parts: torch.cat([*parts], dim).view(shape[whole.prepended :])),
        replica_id=whole.replica_id,
    )


def split_tensor_factory(
    orig_sh_ten: ShardedTensor, split_sections: Sequence[int], split_names: Sequence[str], split_dim: int
) -> ShardedTensorFactory:
    """Return a factory that stores parts of a tensor along ``split_dim`` under ``KEY.NAME``."""
    stored = [(f".{name}", orig_sh_ten.rank_offsets()) for name in split_names]
    return _split_factory(orig_sh_ten, split_dim + orig_sh_ten.prepended, split_sections, stored)


def apply_swiglu_sharded_factory(
    original_sh_ten: ShardedTensor,
    sharded_offsets: Sequence[tuple[int, int, int]],
    singleton_local_shards: bool = False,
    tp_group: Any = None,
    dp_group: Any = None,
) -> ShardedTensorFactory:
    """Return a factory that stores gate and input of a gated MLP, the halves of a rank's rows, as whole matrices.

    With ``singleton_local_shards`` they are two tensors, ``KEY_w`` and ``KEY_v``, otherwise the halves of one.
    ``sharded_offsets``: one for each leading dimension that the caller's tensor lacks. ``tp_group`` and ``dp_group``
    have no effect.
    """
    dim, offsets = len(sharded_offsets), original_sh_ten.rank_offsets()
    count = original_sh_ten.axis_fragmentations[dim]
    index = next((offset[1] for offset in offsets if offset[0] == dim), 0)
    others = [offset for offset in offsets if offset[0] != dim]
    stored = [("", [*others, (dim, number, 2 * count)]) for number in (index, count + index)]
    if singleton_local_shards:
        stored = [(suffix, [*others, (dim, index, count)]) for suffix in ("_w", "_v")]
    return _split_factory(original_sh_ten, dim, [original_sh_ten.data.shape[dim] // 2] * 2, stored)


def built(state_dict: Any) -> Any:
    """Return a copy of nested dicts and lists in which the result of ``build`` replaces each factory."""
    if isinstance(state_dict, ShardedTensorFactory):
        return state_dict.build()
    if isinstance(state_dict, list | tuple):
        return [built(value) for value in state_dict]
    return {k: built(v) for k, v in state_dict.items()} if isinstance(state_dict, dict) else state_dict


def apply_factories(sharded_state_dict: ShardedStateDict) -> None:
    """Replace each factory by the result of ``build``, in place."""
    sharded_state_dict.update(built(sharded_state_dict))


def apply_factory_merges(x1: Any, x2: Any, key: tuple[Any, ...] = ()) -> Any:
    """Return the loaded ``x1`` with the parts of the factories in ``x2`` merged to tensors."""
    if isinstance(x2, ShardedTensorFactory):
        return x2.merge_fn(x1)
    if not _holds_factory(x2):
        return x1
    if isinstance(x2, list | tuple):
        return [apply_factory_merges(a, b, (*key, i)) for i, (a, b) in enumerate(zip(x1, x2, strict=True))]
    if missing := [name for name in x2 if name not in x1]:
        raise CheckpointError(f"the checkpoint has no {'.'.join(map(str, (*key, missing[0])))}")
    return x1 | {name: apply_factory_merges(x1[name], value, (*key, name)) for name, value in x2.items()}


def _holds_factory(value: Any) -> bool:
    inside = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, ShardedTensorFactory) or any(map(_holds_factory, inside))


ShardedBase = ShardedTensor | ShardedObject | ShardedTensorFactory
"""All kinds of values with a key."""
