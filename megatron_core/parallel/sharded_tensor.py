"""A local tensor with its place in a global tensor, with Megatron Core's attribute names: a view of a ``ShardSpec``."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.parallel.sharding import ShardSpec, Split, spec_of


@dataclass
class ShardedTensor:
    """``data`` is this rank's part, described by ``spec``, of the tensor that checkpoints store as ``key``.

    ``global_shape``, ``global_offset``, ``axis_fragmentations`` and ``replica_id`` (0 on the rank that saves it) are
    Megatron Core's description of an even part. Parts of several pieces (fused matrices) are described only by
    ``spec``.
    """

    key: str
    data: Tensor
    spec: ShardSpec
    replica_id: int | tuple[int, ...] = 0
    """0, or a tuple of zeros, on the rank that saves the part; other data-parallel ranks have other numbers."""
    allow_shape_mismatch: bool = False
    flattened: tuple[tuple[int, ...], int, int] | None = None
    """(local shape, first, stop) if ``data`` is only the elements first ... stop - 1 of the flattened local tensor."""
    prepended: int = 0
    """Number of leading dimensions of size 1 that the caller's tensor does not have."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of ``data``."""
        return self.data.dtype

    @property
    def local_shape(self) -> tuple[int, ...]:
        """Shape of ``data``."""
        return tuple(self.data.shape)

    @property
    def global_shape(self) -> tuple[int, ...]:
        """Shape of the global tensor."""
        return self.spec.global_shape

    @property
    def global_offset(self) -> tuple[int, ...]:
        """Offset of the part in the global tensor."""
        parts = self.spec.parts
        return parts[0].whole.start if parts else (0,) * len(self.global_shape)

    @property
    def axis_fragmentations(self) -> tuple[int, ...]:
        """Number of parts along each dimension."""
        counts = [1] * len(self.global_shape)
        for split in self.spec.splits:
            counts[split.dim] *= len(split.ranges)
        return tuple(counts)

    @property
    def is_main_replica(self) -> bool:
        """Whether this rank saves the part."""
        return not any(self.replica_id) if isinstance(self.replica_id, tuple) else self.replica_id == 0

    @classmethod
    def of(cls, key: str, tensor: Tensor) -> ShardedTensor:
        """A parameter with its ``ShardSpec``; a tensor without one is replicated."""
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
    ) -> ShardedTensor:
        """Build from triples (dimension, index of this part, number of equal parts) in ``rank_offsets``.

        ``prepend_axis_num`` dimensions precede those of ``data``, with one element each on this rank, such as a layer
        number; dimensions in the triples count from the first of these.
        """
        if flattened_range is not None:
            raise LayoutError(f"{key}: flattened_range={flattened_range} is not supported; omit it")
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

    def narrow(self, dim: int, start: int, length: int) -> list[ShardedTensor]:
        """Narrow along ``dim`` on every rank; returns this rank's part in a list."""
        counts, parts = self.axis_fragmentations, dict(self.spec.indices)
        offsets = [(split.dim, parts[split.axis], counts[split.dim]) for split in self.spec.splits]
        data = self.data.narrow(dim, start, length)
        return [ShardedTensor.from_rank_offsets(self.key, data, *offsets, replica_id=self.replica_id)]

    def validate_metadata_integrity(self) -> None:
        """LayoutError if the shape of ``data`` differs from the one in ``spec``."""
        if self.flattened is None and self.local_shape != self.spec.local_shape:
            raise LayoutError(f"{self.key} has the shape {self.local_shape}, but its spec says {self.spec.local_shape}")
