"""Where elements of a rank's tensors lie in the global tensors: arithmetic on boxes, no files."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

from torch import Tensor, nn

from megatron_core.parallel.sharding import ShardSpec, spec_of


@dataclass(frozen=True)
class Box:
    """The half-open box ``start <= index < stop`` of a global tensor."""

    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        """Extents."""
        return tuple(b - a for a, b in zip(self.start, self.stop, strict=True))

    @property
    def numel(self) -> int:
        """Elements."""
        return prod(self.shape)

    def intersect(self, other: Box) -> Box | None:
        """The common part, or None."""
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        return Box(start, stop) if all(a < b for a, b in zip(start, stop, strict=True)) else None

    def within(self, outer: Box) -> tuple[slice, ...]:
        """Index of this box in a tensor that holds ``outer``."""
        return tuple(slice(a - o, b - o) for a, b, o in zip(self.start, self.stop, outer.start, strict=True))


@dataclass(frozen=True)
class Piece:
    """A box of a global tensor and the memory of this rank that holds it."""

    name: str
    global_shape: tuple[int, ...]
    box: Box
    memory: Tensor
    """A view with the box's shape."""
    owned: bool
    """Whether this rank is the one that saves the box."""


def flat_boxes(shape: tuple[int, ...], start: int, stop: int) -> Iterator[tuple[Box, int]]:
    """The elements ``start ... stop - 1`` of a row-major tensor as boxes, each with its first element's number."""
    if len(shape) <= 1:
        yield Box((start,)[: len(shape)], (stop,)[: len(shape)]), start
        return
    row = prod(shape[1:])
    while start < stop:
        first, within = divmod(start, row)
        if within == 0 and stop - start >= row:
            rows = (stop - start) // row
            yield Box((first,) + (0,) * (len(shape) - 1), (first + rows, *shape[1:])), start
            start += rows * row
        else:
            end = min(stop, (first + 1) * row)
            for inner, at in flat_boxes(shape[1:], within, within + end - start):
                yield Box((first, *inner.start), (first + 1, *inner.stop)), first * row + at
            start = end


def parameter_pieces(named: Iterable[tuple[str, nn.Parameter]]) -> Iterator[Piece]:
    """Pieces of whole parameters, as ``model.NAME``."""
    for name, parameter in named:
        shape, numel = tuple(parameter.shape), parameter.numel()
        yield from pieces_of(f"model.{name}", spec_of(parameter), shape, 0, numel, parameter.data.view(-1))


def pieces_of(
    name: str, spec: ShardSpec, local_shape: tuple[int, ...], start: int, stop: int, flat: Tensor
) -> Iterator[Piece]:
    """Pieces of ``flat``: the elements ``start ... stop - 1`` of this rank's part of the tensor ``name``."""
    for local, number in flat_boxes(local_shape, start, stop):
        memory = flat[number - start : number - start + local.numel].view(local.shape)
        for part, box in _to_global(spec, local):
            yield Piece(name, spec.global_shape, box, memory[part.within(local)], _owned(spec, part))


def _to_global(spec: ShardSpec, local: Box) -> Iterator[tuple[Box, Box]]:
    """Split a local box at the borders of the held ranges: (local part, its global box); padding falls away."""
    if spec.dim is None:
        yield local, local
        return
    dim, at = spec.dim, 0
    for start, stop in spec.local_ranges:
        first, last = max(at, local.start[dim]), min(at + stop - start, local.stop[dim])
        if first < last:
            part = Box(_replace(local.start, dim, first), _replace(local.stop, dim, last))
            shift = start - at
            yield part, Box(_replace(part.start, dim, first + shift), _replace(part.stop, dim, last + shift))
        at += stop - start


def _owned(spec: ShardSpec, part: Box) -> bool:
    if not part.start:
        return spec.index == 0 and not spec.is_copy
    return any(first <= part.start[0] and part.stop[0] <= last for first, last in spec.owned_local())


def _replace(values: tuple[int, ...], at: int, value: int) -> tuple[int, ...]:
    return (*values[:at], value, *values[at + 1 :])
