"""Where parameters lie in the flat buffers of data parallelism: which share a bucket, where each begins, what pads it.

Numbers alone: no memory and no groups.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")


def round_up(value: int, multiple: int) -> int:
    """The least multiple of ``multiple`` that is not below ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class BucketLayout:
    """Where the parameters of one bucket lie in it."""

    offsets: list[int]
    end: int
    """Behind the last element."""
    used: int
    """Elements that are filled, or lie between parameters of a bucket in order."""
    padded: int
    """The length of the bucket, which divides evenly among its shards."""


class Rule(Protocol):
    """How a bucket is filled."""

    def is_full(self, sizes: Sequence[int], following: int, bucket_size: int) -> bool:
        """Whether parameters of these sizes fill a bucket, so that one of ``following`` elements begins the next."""
        ...

    def place(self, sizes: Sequence[int], costs: Sequence[int]) -> BucketLayout:
        """Where they lie; ``costs`` is the work of their updates."""
        ...


@dataclass(frozen=True)
class InOrder:
    """One after another; shards may cut parameters anywhere."""

    start_multiple: int = 1
    """Of which each parameter's offset is a multiple."""
    end_multiple: int = 1
    """Of which the bucket's length is."""

    def is_full(self, sizes: Sequence[int], following: int, bucket_size: int) -> bool:
        """When there are ``bucket_size`` elements."""
        return self.place(sizes, ()).end >= bucket_size

    def place(self, sizes: Sequence[int], costs: Sequence[int]) -> BucketLayout:
        """In the order given."""
        offsets, end = [], 0
        for size in sizes:
            offsets.append(round_up(end, self.start_multiple))
            end = offsets[-1] + size
        return BucketLayout(offsets, end, end, round_up(end, self.end_multiple))


def matrix_work(shape: Sequence[int]) -> int:
    """What it costs to orthogonalise matrices ``[..., m, n]``, m n min(m, n) each; elements of other tensors."""
    return math.prod(shape) * (min(shape[-2:]) if len(shape) > 1 else 1)


class WholeInShards:
    """Each parameter whole in one shard, so that its update needs no other rank: for optimizers of whole matrices.

    The most expensive first, to the shard with the least work in all buckets so far among those that stay below 1.3
    times the mean size; if all are too full for it, to the shortest one. A bucket also takes what pads its shards
    (longest processing time first: Graham 1969).
    """

    def __init__(self, shards: int, start_multiple: int = 1, shard_multiple: int = 1) -> None:
        self.shards, self.start_multiple, self.shard_multiple = shards, start_multiple, shard_multiple
        self.work = [0] * shards

    def is_full(self, sizes: Sequence[int], following: int, bucket_size: int) -> bool:
        """When there are ``bucket_size`` elements, or nearly the largest in each shard, and the next would grow it."""
        if sum(sizes) < max(bucket_size, int(0.9 * self.shards * max(sizes))):
            return False
        ends = [0] * self.shards
        for size in sizes:
            shortest = ends.index(min(ends))
            ends[shortest] = round_up(ends[shortest], self.start_multiple) + size
        return round_up(min(ends), self.start_multiple) + following > round_up(max(ends), self.shard_multiple)

    def place(self, sizes: Sequence[int], costs: Sequence[int]) -> BucketLayout:
        """In equally long shards."""
        limit, ends, at = 1.3 * sum(sizes) / self.shards, [0] * self.shards, [(0, 0)] * len(sizes)
        for number in sorted(range(len(sizes)), key=lambda n: -costs[n]):
            starts = [round_up(end, self.start_multiple) for end in ends]
            fit = [shard for shard, start in enumerate(starts) if start + sizes[number] <= limit]
            shard = min(fit, key=self.work.__getitem__) if fit else ends.index(min(ends))
            at[number] = shard, starts[shard]
            ends[shard] = starts[shard] + sizes[number]
            self.work[shard] += costs[number]
        length = round_up(max(ends), self.shard_multiple)
        offsets = [shard * length + start for shard, start in at]
        end = max(offset + size for offset, size in zip(offsets, sizes, strict=True))
        return BucketLayout(offsets, end, sum(sizes), length * self.shards)


class Packer(Generic[Item]):
    """Fills one bucket after another with what it is given, and hands out those that are full."""

    def __init__(self, rule: Rule, bucket_size: int) -> None:
        self.rule, self.bucket_size = rule, bucket_size
        self._items: list[tuple[Item, int, int]] = []

    def add(
        self, item: Item, size: int, cost: int, *, alone: bool = False
    ) -> Iterator[tuple[list[Item], BucketLayout]]:
        """Take a parameter; ``alone``: into a bucket of its own. Yields the buckets that are closed by that."""
        if self._items and (alone or self.rule.is_full(self._sizes(), size, self.bucket_size)):
            yield from self.close()
        self._items.append((item, size, cost))
        if alone:
            yield from self.close()

    def close(self) -> Iterator[tuple[list[Item], BucketLayout]]:
        """The bucket that is not full, if there is one; its parameters in the order in which they lie in it."""
        if self._items:
            layout = self.rule.place(self._sizes(), [cost for _, _, cost in self._items])
            order = sorted(range(len(self._items)), key=layout.offsets.__getitem__)
            items = [self._items[number][0] for number in order]
            self._items = []
            yield items, replace(layout, offsets=[layout.offsets[number] for number in order])

    def _sizes(self) -> list[int]:
        return [size for _, size, _ in self._items]
