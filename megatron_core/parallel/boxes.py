"""Boxes: rectangular parts of a tensor, as integers (no torch)."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import prod


@dataclass(frozen=True)
class Box:
    """The half-open box ``start <= index < stop`` of a tensor."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of the box in each dimension."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    @property
    def index(self) -> tuple[slice, ...]:
        """Index of this box in the tensor it belongs to."""
        return tuple(slice(a, b) for a, b in zip(self.start, self.stop, strict=True))

    def intersect(self, other: "Box") -> "Box | None":
        """The intersection with ``other``; None if it is empty."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def within(self, outer: "Box") -> tuple[slice, ...]:
        """Index of this box in a smaller tensor that stores only ``outer``."""
        return self.shifted(tuple(-o for o in outer.start)).index

    def shifted(self, offset: tuple[int, ...]) -> "Box":
        """The box moved by ``offset``."""
        start = tuple(a + o for a, o in zip(self.start, offset, strict=True))
        return Box(start, tuple(b + o for b, o in zip(self.stop, offset, strict=True)))

    def flat_ranges(self, shape: tuple[int, ...]) -> Iterator[tuple[int, int]]:
        """Ranges of flat indices that this box covers in a row-major tensor of ``shape``, in ascending order."""
        # Trailing dims that the box covers whole are contiguous in memory: they join one range, so that a split along
        # dim 0 gives a single read instead of one per row.
        inner = len(shape)
        while inner and self.start[inner - 1] == 0 and self.stop[inner - 1] == shape[inner - 1]:
            inner -= 1
        if inner == 0:
            yield 0, prod(shape)
            return
        row = prod(shape[inner:])
        outer = Box(self.start[: inner - 1], self.stop[: inner - 1])
        for number in outer.numbers(shape[: inner - 1]):
            base = number * shape[inner - 1]
            yield (base + self.start[inner - 1]) * row, (base + self.stop[inner - 1]) * row

    def numbers(self, shape: tuple[int, ...]) -> Iterator[int]:
        """Flat indices of this box in a row-major tensor of ``shape``."""
        if not shape:
            yield 0
            return
        for number in Box(self.start[:-1], self.stop[:-1]).numbers(shape[:-1]):
            yield from range(number * shape[-1] + self.start[-1], number * shape[-1] + self.stop[-1])


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """Split the flat range ``start ... stop - 1`` of a row-major tensor into boxes; yields each with its first flat
    index."""
    # A scalar has one element and an empty box, whose index works as that of a vector.
    if len(shape) <= 1:
        yield Box((start,)[: len(shape)], (stop,)[: len(shape)]), start
        return
    row = prod(shape[1:])
    while start < stop:
        first, within = divmod(start, row)
        # Whole rows are one box. Only the ends of a flat range, such as a ZeRO shard, fall within a row and recurse; so
        # a range has at most 2 boxes for each dim, however long it is.
        if within == 0 and stop - start >= row:
            rows = (stop - start) // row
            yield Box((first,) + (0,) * (len(shape) - 1), (first + rows, *shape[1:])), start
            start += rows * row
        else:
            end = min(stop, (first + 1) * row)
            for inner, offset in flat_boxes(shape[1:], within, within + end - start):
                yield Box((first, *inner.start), (first + 1, *inner.stop)), first * row + offset
            start = end
