"""All-to-all of sequence parts and heads: each rank gets some heads of all tokens (Jacobs et al. 2023, Ulysses)."""

import math

import torch
from torch import Tensor

from megatron_core.parallel.collectives import exchange_parts
from megatron_core.parallel.groups import Group


def replicated_groups(groups: int, size: int) -> int:
    """Number of key-value heads after replication: the smallest multiple of ``groups`` that ``size`` divides."""
    return math.lcm(groups, size)


# Heads are independent, so each rank computes its own without exchanging keys: four all-to-alls for a layer instead of
# a ring (Jacobs et al. 2023).
class HeadExchange:
    """Exchanges heads within ``group``, whose ranks are adjacent in a context-parallel group of ``cp_size`` ranks.

    Adjacent ranks of a zig-zag hold adjacent chunks of the sequence: together these are the two chunks of one rank of a
    zig-zag over cp_size / size ranks.
    """

    def __init__(self, group: Group) -> None:
        self.group = group

    def to_heads(self, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """``[n, b, heads, d]``, ``[n, b, groups, d]`` and ``[n, b, groups, e]`` -> ``[n size, b, heads / size, d]`` and
        the corresponding key-value heads; tokens in ascending order. Uses one message."""
        size = self.group.size()
        # Each rank needs whole key-value heads; copies of them are sent when there are fewer than ranks, and their
        # gradients are added by the backward of the repetition.
        copies = replicated_groups(key.shape[2], size) // key.shape[2]
        if copies > 1:
            key, value = (tensor.repeat_interleave(copies, dim=2) for tensor in (key, value))
        projections = [tensor.unflatten(2, (size, -1)) for tensor in (query, key, value)]
        shapes = [x.shape[3:] for x in projections]
        # One message instead of three: small ones are bound by latency.
        mixed = exchange_parts(torch.cat([x.flatten(3) for x in projections], dim=3).movedim(2, 0), self.group)
        local_heads = self._ascending(mixed).split([shape.numel() for shape in shapes], dim=2)
        query, key, value = (tensor.unflatten(2, shape) for tensor, shape in zip(local_heads, shapes, strict=True))
        return query, key, value

    def to_sequence(self, out: Tensor) -> Tensor:
        """The inverse of ``to_heads`` for outputs: ``[n size, b, heads / size * d]`` -> ``[n, b, heads * d]``."""
        by_rank = self._by_rank(out)
        return exchange_parts(by_rank, self.group).movedim(0, 2).flatten(2)

    def _ascending(self, by_rank: Tensor) -> Tensor:
        """``[size, n, ...]``, the tokens of each rank -> ``[size n, ...]`` in ascending order: the first chunks in the
        order of ranks, the second chunks in reverse order."""
        # A zig-zag gives rank r the chunks r and 2 p - 1 - r.
        first, second = by_rank.chunk(2, dim=1)
        return torch.cat([first.flatten(0, 1), second.flip(0).flatten(0, 1)])

    def _by_rank(self, tokens: Tensor) -> Tensor:
        """The inverse of ``_ascending``."""
        first, second = (half.unflatten(0, (self.group.size(), -1)) for half in tokens.chunk(2))
        return torch.cat([first, second.flip(0)], dim=1)
