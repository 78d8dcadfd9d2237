"""Settings of data parallelism, and the rules that fill buckets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from megatron_core.data_parallel.bucket_kind import BucketKind
from megatron_core.data_parallel.bucket_layout import InOrder, Rule, WholeInShards

SHARD_MULTIPLE = 8
"""A shard's length is a multiple of this number of elements: shards start at 16 bytes for vectorised kernels."""


def in_order(kind: BucketKind, shards: int) -> Rule:
    """Return the default rule: parameters in order, shards aligned to 16 bytes."""
    return InOrder(1, shards * SHARD_MULTIPLE)


def whole_matrices(kind: BucketKind, shards: int) -> Rule:
    """Return the rule for filling buckets such that no shard cuts a hidden matrix."""
    return whole_parameters(kind, shards) if kind.is_hidden_matrix else in_order(kind, shards)


def whole_parameters(kind: BucketKind, shards: int) -> Rule:
    """Return the rule for filling buckets such that no shard cuts a parameter."""
    return WholeInShards(shards, 1, SHARD_MULTIPLE)


@dataclass(frozen=True, kw_only=True)
class DataParallelSettings:
    """How gradients are summed, and how parameters are divided into buckets and shards; see ``DataParallel``."""

    zero_stage: int = 0
    """0: whole state on every rank; 1: shards of the optimizer's state; 2: also of gradients; 3: also of weights."""
    bucket_size: int = 40_000_000
    """Number of elements from which a bucket is full."""
    rule_of: Callable[[BucketKind, int], Rule] = in_order
    """Returns the rule that fills buckets of a kind, for a number of shards."""
    join: Callable[[BucketKind], BucketKind] | None = None
    """Parameters whose kinds this function maps to the same kind share buckets."""
    overlap_grad_reduce: bool = False
    """Whether a bucket's sum starts when its gradients are complete, during the backward of other units."""
    overlap_param_gather: bool = False
    """Whether weights are gathered during the computation of other units."""
    keep_after_forward: bool = False
    """Whether gathered weights of stage 3 stay in memory from their first use to the end of the step."""
    wire_dtype: torch.dtype | None = None
    """Dtype in which gradients are sent and summed; by default their own."""
    sums_wide: bool = False
    """Whether shards of gradients sent in ``wire_dtype`` are summed in the gradients' own dtype."""
    exact_sums: bool = False
    """Whether gradients are sums in float64 of addends from ``ops.exact_sum``."""
    ranks_may_differ: bool = False
    """Whether ranks may run different modules, so that they agree on the order of sums: see ``Agreement``."""
