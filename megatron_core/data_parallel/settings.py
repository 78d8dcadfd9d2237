"""Settings of data parallelism, kinds of buckets, and the rules that fill them."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn

from megatron_core.data_parallel.bucket_layout import FillRule, InOrder
from megatron_core.parallel.groups import Group, ParallelGroups
from megatron_core.parallel.handles import Handle
from megatron_core.parallel.sharding import spec_of
from megatron_core.tensor_parallel.arithmetic import PLAIN, LayerArithmetic

Span = tuple[nn.Parameter, int, int, int]
"""Parameter, its first element in a shard, its end there, and the offset of the first element in the shard."""


class StartGather(Protocol):
    """Function that fills the weights of a bucket with the shards of all ranks."""

    def __call__(
        self,
        weights: Tensor,
        shard: Tensor,
        spans: Sequence[Span],
        parameters: Sequence[tuple[int, nn.Parameter]],
        group: Group,
    ) -> tuple[Handle, int]:
        """Start to fill ``weights`` with every rank's ``shard``; return the handle and the number of bytes sent.

        ``parameters`` are the bucket's parameters with their offsets in ``weights``, ``spans`` the parts of them in the
        shard.
        """
        ...


SHARD_MULTIPLE = 8
"""A shard's length is a multiple of this number of elements: shards start at 16 bytes for vectorised kernels."""


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
    persistent: bool = False
    """Whether stage 3 keeps the weights whole on every rank."""
    start_gather: StartGather | None = None
    """Gathers the weights in another format; set as an attribute of parameters by their layers."""

    @classmethod
    def of(cls, parameter: nn.Parameter, groups: ParallelGroups) -> "BucketKind":
        """Return the kind of bucket for a parameter."""
        spec = spec_of(parameter)
        matrix = len(spec.global_shape) > 1 and not getattr(parameter, "is_vector", False)
        shared = (split.axis for split in spec.splits if split.shared)
        return cls(
            dtype=parameter.dtype,
            decay=matrix or getattr(parameter, "decays", False),
            matrix=matrix,
            replica_axes=spec.replica_axes,
            # Axes of one rank are left out: their parameters may share buckets with others.
            partial_axes=tuple(axis for axis in spec.partial_axes if groups.size(axis) > 1),
            shared_axes=tuple(axis for axis in shared if groups.size(axis) > 1),
            embedding=getattr(parameter, "is_embedding_or_output_parameter", False),
            tied=spec.tied,
            start_gather=getattr(parameter, "start_gather", None),
        )

    @property
    def is_hidden_matrix(self) -> bool:
        """Whether the parameters are matrices between two layers: no embedding, head, bias or norm."""
        return self.matrix and not self.embedding

    @property
    def is_partial(self) -> bool:
        """Whether gradients must be completed before they are summed over data-parallel ranks."""
        return bool(self.partial_axes or self.shared_axes or self.tied)


BucketRule = Callable[[BucketKind, int], FillRule]
"""Returns the rule that fills buckets of a kind, for a number of shards."""


def in_order(bucket_kind: BucketKind, shards: int) -> FillRule:
    """Return the default rule: parameters in order, shards aligned to 16 bytes."""
    return InOrder(1, shards * SHARD_MULTIPLE)


@dataclass(frozen=True, kw_only=True)
class DataParallelSettings:
    """How gradients are summed, and how parameters are divided into buckets and shards; see ``DataParallel``."""

    zero_stage: int = 0
    """0: whole state on every rank; 1: shards of the optimizer's state; 2: also of gradients; 3: also of weights."""
    bucket_size: int = 40_000_000
    """Number of elements from which a bucket is full."""
    rule_of: BucketRule = in_order
    """Returns the rule that fills buckets of a kind, for a number of shards."""
    join: Callable[[BucketKind], BucketKind] | None = None
    """Parameters whose kinds this function maps to the same kind share buckets."""
    overlap_grad_reduce: bool = False
    """Whether a bucket's sum starts when its gradients are complete, during the backward of other units."""
    overlap_param_gather: bool = False
    """Whether weights are gathered during the computation of other units."""
    keep_after_forward: bool = False
    """Whether gathered weights of stage 3 stay in memory from their first use to the end of the step."""
    persistence_threshold: int = 0
    """Largest number of elements of parameters whose weights stage 3 does not shard, as stage 2."""
    wire_dtype: torch.dtype | None = None
    """Dtype in which gradients are sent and summed; by default their own."""
    sums_wide: bool = False
    """Whether shards of gradients sent in ``wire_dtype`` are summed in the gradients' own dtype."""
    arithmetic: LayerArithmetic = PLAIN
    """Sums of the model; gradients are float64 if it adds exactly."""
    ranks_may_differ: bool = False
    """Whether ranks may run different modules, so that they agree on the order of sums: see ``Agreement``."""
