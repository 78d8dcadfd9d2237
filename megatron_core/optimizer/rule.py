"""Base classes of update rules, and the slices and rates of an update."""

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from megatron_core.config import OptimizerConfig
from megatron_core.data_parallel import Bucket
from megatron_core.ops import Backend
from megatron_core.parallel.groups import ParallelGroups

NEVER_CORRECTED = 10**9
"""A step at which the bias correction 1 - beta^step is 1 for every beta that a float32 can hold below 1."""


@dataclass(frozen=True, eq=False)
# Flat slices: a rule never sees shapes, so it works on any shard, chunk or offloaded part.
class ShardSlice:
    """A slice of a shard: flat tensors of equal length."""

    grad: Tensor
    main: Tensor
    """The main weights, in float32 or wider (stored main weights may also be bfloat16, see ``rounding``)."""
    copy: Tensor | None
    """16-bit weights of the model, set to the rounded ``main``."""
    state: dict[str, Tensor]


@dataclass(frozen=True)
class Rates:
    """The settings shared by all parts of an update."""

    step: int
    """Counted from 1."""
    lr: float
    weight_decay: float
    factor: float
    """Factor on the gradients: clipping and the inverse loss scale."""
    epsilon: float = 1e-8
    """``adam_eps``, with the factor of ``--use-mup``."""
    betas: tuple[float, float] | None = None
    """Instead of ``adam_beta1`` and ``adam_beta2``."""
    momentum: float | None = None
    """Instead of ``sgd_momentum``, if that is not 0."""


class Algorithm:
    """An update rule for any slice of a shard."""

    def __init__(
        self, config: OptimizerConfig, backend: Backend = "auto", groups: ParallelGroups | None = None
    ) -> None:
        """``groups``: all process groups of this rank, for rules that communicate."""
        self.config = config
        self.backend = backend
        self.groups = groups

    def update(self, pieces: Sequence[ShardSlice], rates: Rates) -> None:
        """Update the weights and the state of each part in place, and its ``copy`` (``write_copy``).

        The gradient is ``part.grad * rates.factor``; ``part.grad`` may be overwritten. ``part.state`` has the moments
        of the optimizer's row, with the dtype of ``part.main``.
        """
        raise NotImplementedError

    def has_local_changes(self, bucket: Bucket) -> bool:
        """Whether this rank's weights of ``bucket`` differ from those of the other data-parallel ranks."""
        return False

    def synchronize(self, bucket: Bucket, shard: ShardSlice) -> None:
        """Make the weights and the state of the shard ``shard`` equal on all data-parallel ranks; a collective call."""

    def forget_local_changes(self) -> None:
        """Drop the differences between ranks: weights and state have been loaded from a checkpoint."""


class BucketAlgorithm(Algorithm):
    """An update rule whose ``update`` replaces each gradient by a direction, along which buckets move afterwards."""

    def finish_bucket(self, bucket: Bucket, shard: ShardSlice, runs: Sequence[tuple[slice, Rates]]) -> None:
        """Update the weights of the shard ``shard``, whose gradient is the direction.

        ``runs``: slices of the shard with their rates. A collective call of all ranks that share the bucket's tensors.
        """
        raise NotImplementedError


def write_copy(piece: ShardSlice) -> None:
    """Copy the main weights to the weights of the model, with rounding to their dtype."""
    if piece.copy is not None:
        piece.copy.copy_(piece.main)
