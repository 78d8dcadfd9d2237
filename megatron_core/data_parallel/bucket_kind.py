"""Properties that all parameters of a bucket share."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn

from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.sharding import spec_of


@dataclass(frozen=True)
class BucketKind:
    """Common properties of a bucket's parameters, equal on every rank with a shard or a copy of them."""

    dtype: torch.dtype
    decay: bool
    """Whether weight decay applies: to matrices and tables; to biases and norms only if they are marked ``decays``."""
    matrix: bool
    """Whether the parameters are matrices or tables, or stacks of matrices."""
    replica_axes: tuple[str, ...]
    """Data axes over which gradients are summed."""
    partial_axes: tuple[str, ...] = ()
    """Model axes over which gradients are summed element by element first."""
    shared_axes: tuple[str, ...] = ()
    """Model axes over which gradients of shared ranges are summed first (keys and values of a fused QKV matrix)."""
    embedding: bool = False
    """Word embedding or output layer: not hidden matrices; they may have a separate learning rate."""
    tied: tuple[int, ...] = ()
    """Pipeline ranks over which gradients are summed first (weights of several stages)."""

    @classmethod
    def of(cls, parameter: nn.Parameter, groups: ParallelGroups) -> BucketKind:
        """Return the kind of bucket for a parameter."""
        spec = spec_of(parameter)
        matrix = len(spec.global_shape) > 1 and not getattr(parameter, "is_vector", False)
        shared = (split.axis for split in spec.splits if split.shared)
        return cls(
            dtype=parameter.dtype,
            decay=matrix or getattr(parameter, "decays", False),
            matrix=matrix,
            replica_axes=spec.replica_axes,
            partial_axes=tuple(axis for axis in spec.partial_axes if groups.size(axis) > 1),
            shared_axes=tuple(axis for axis in shared if groups.size(axis) > 1),
            embedding=getattr(parameter, "is_embedding_or_output_parameter", False),
            tied=spec.tied,
            narrow=getattr(parameter, "fp8", None) is not None,
        )

    narrow: bool = False
    """Whether weights are gathered in FP8."""

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether the parameters are matrices between two layers: no embedding, head, bias or norm."""
        return self.matrix and not self.embedding

    @property
    def is_partial(self) -> bool:
        """Whether gradients must be completed before they are summed over data-parallel ranks."""
        return bool(self.partial_axes or self.shared_axes or self.tied)
