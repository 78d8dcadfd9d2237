"""The global gradient norm: every element of the model counted once, whatever the layout."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from megatron_core.data_parallel import Bucket
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.groups import ParallelGroups


class GradientNorm:
    """|g| = sqrt(sum of squares) over all ranks' ``buckets``.

    Each rank counts what it owns: replicated parameters and shared key-value rows on the lowest rank that holds them,
    a tied weight on the first stage, a shard on its data-parallel rank.
    """

    def __init__(self, buckets: Iterable[Bucket], groups: ParallelGroups) -> None:
        self.owned = [(bucket, bucket.owned_ranges()) for bucket in buckets]
        sharded = any(bucket.sharded for bucket, _ in self.owned)
        self.group = groups.group("tp-cp-ep-dp-pp" if sharded else "tp-pp")

    def compute(self) -> float:
        """The norm of the reduced gradients; inf or nan if any element on any rank is."""
        parts = [
            torch.linalg.vector_norm(bucket.grad_shard[start:stop]).to(torch.float64)
            for bucket, ranges in self.owned
            for start, stop in ranges
        ]
        total = _sum_of_squares(parts, self.owned[0][0].grads.device)
        all_reduce_(total, self.group)
        return total.sqrt().item()


def _sum_of_squares(parts: list[Tensor], device: torch.device) -> Tensor:
    if not parts:
        return torch.zeros((), dtype=torch.float64, device=device)
    return torch.stack(parts).square().sum()


def clip_factor(norm: float, limit: float) -> float:
    """What to multiply gradients by so that their norm is at most ``limit`` (Pascanu et al. 2013); 0 turns it off."""
    return min(1.0, limit / (norm + 1e-6)) if limit > 0.0 else 1.0
