"""Layout of the flat buffers of data parallelism: the parameters of each bucket, their offsets, and padding.

It computes with sizes only, without memory or groups.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Generic, Protocol, TypeVar

Item = TypeVar("Item")


def round_up(value: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is >= ``value``."""
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class BucketLayout:
    """Offsets of the parameters in one bucket."""

    offsets: list[int]
    end: int
    """End of the last parameter."""
    used: int
    """Number of elements without padding; for a bucket in order, gaps between parameters included."""
    padded: int
    """Length of the bucket, a multiple of the number of shards."""


class FillRule(Protocol):
    """Rule that fills a bucket."""

    def is_full(self, sizes: Sequence[int], following: int, bucket_size: int) -> bool:
        """Whether parameters of these sizes fill a bucket, so that a parameter of ``following`` elements starts the
        next.
        """
        ...

    def place(self, sizes: Sequence[int], costs: Sequence[int]) -> BucketLayout:
        """Return the layout of parameters of these sizes; ``costs`` is the cost of their updates."""
        ...


@dataclass(frozen=True)
class InOrder:
    """Rule that places parameters in order; shard boundaries may split parameters."""

    start_multiple: int = 1
    """Alignment of each parameter's offset, in elements."""
    end_multiple: int = 1
    """The bucket's length is a multiple of this number."""

    def is_full(self, sizes: Sequence[int], following: int, bucket_size: int) -> bool:
        """Whether the bucket has at least ``bucket_size`` elements."""
        return self.place(sizes, ()).end >= bucket_size

    def place(self, sizes: Sequence[int], costs: Sequence[int]) -> BucketLayout:
        """Place parameters in the given order."""
        offsets = []
        end = 0
        for size in sizes:
            offsets.append(round_up(end, self.start_multiple))
            end = offsets[-1] + size
        return BucketLayout(offsets, end, end, round_up(end, self.end_multiple))


def matrix_work(shape: Sequence[int]) -> int:
    """Return the relative cost of an update: s^2 (2 l + s) per matrix of ``[..., m, n]``, with s = min(m, n) and
    l = max(m, n) (multiplications of a Newton-Schulz iteration), else the elements.
    """
    if len(shape) < 2:
        return math.prod(shape)
    short, long = sorted(shape[-2:])
    return math.prod(shape[:-2]) * short**2 * (2 * long + short)


class Packer(Generic[Item]):
    """Fills buckets one after another and yields each full bucket."""

    def __init__(self, rule: FillRule, bucket_size: int) -> None:
        self.rule = rule
        self.bucket_size = bucket_size
        self._items: list[tuple[Item, int, int]] = []

    def add(
        self, item: Item, size: int, cost: int, *, alone: bool = False
    ) -> Iterator[tuple[list[Item], BucketLayout]]:
        """Add a parameter, with ``alone`` to a separate bucket; yield the buckets that this completes."""
        if self._items and (alone or self.rule.is_full(self._sizes(), size, self.bucket_size)):
            yield from self.close()
        self._items.append((item, size, cost))
        if alone:
            yield from self.close()

    def close(self) -> Iterator[tuple[list[Item], BucketLayout]]:
        """Yield the unfinished bucket, if there is one, with its parameters in the order of their offsets."""
        if self._items:
            layout = self.rule.place(self._sizes(), [cost for _, _, cost in self._items])
            order = sorted(range(len(self._items)), key=layout.offsets.__getitem__)
            items = [self._items[number][0] for number in order]
            self._items = []
            yield items, replace(layout, offsets=[layout.offsets[number] for number in order])

    def _sizes(self) -> list[int]:
        return [size for _, size, _ in self._items]
