"""Ranks and coordinates: integer arithmetic only, no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod

from megatron_core.errors import LayoutError

AXES = ("tp", "cp", "ep", "dp", "pp")
DEFAULT_ORDER = "-".join(AXES)


@dataclass(frozen=True)
class Grid:
    """Places ranks on the axes tp, cp, ep, dp and pp.

    With the axes of ``order`` from fastest to slowest and sizes n0, n1, n2, ...:
    rank = rank_offset + i0 + n0 (i1 + n1 (i2 + ...)). An axis of size 1 may be left out of ``order``.
    Source: Narayanan et al. 2021, section 3; the default order is Megatron-LM's.
    """

    tp: int = 1
    cp: int = 1
    ep: int = 1
    dp: int = 1
    pp: int = 1
    order: str = DEFAULT_ORDER
    rank_offset: int = 0

    def __post_init__(self) -> None:
        axes = self.order.split("-")
        for axis in axes:
            if axis not in AXES:
                raise LayoutError(f"rank_order={self.order!r} names the axis {axis!r}; legal: {', '.join(AXES)}")
        if len(set(axes)) != len(axes):
            raise LayoutError(f"rank_order={self.order!r} names an axis twice; name each of {DEFAULT_ORDER} once")
        for axis in AXES:
            if self.size(axis) < 1:
                raise LayoutError(f"{axis}={self.size(axis)} is no size of an axis; give 1 or more")
            if self.size(axis) > 1 and axis not in axes:
                raise LayoutError(f"rank_order={self.order!r} lacks {axis!r}, whose size is {self.size(axis)}; add it")

    @classmethod
    def fit(cls, world_size: int, *, tp: int = 1, cp: int = 1, pp: int = 1, order: str = DEFAULT_ORDER) -> Grid:
        """The grid that fills ``world_size`` ranks with copies of a model split tp x cp x pp ways."""
        model = tp * cp * pp
        if model < 1 or world_size % model:
            raise LayoutError(
                f"world size {world_size} cannot be divided by tensor x context x pipeline = {tp} x {cp} x {pp} = "
                f"{model}; start a multiple of {model} ranks or choose smaller sizes"
            )
        return cls(tp=tp, cp=cp, dp=world_size // model, pp=pp, order=order)

    def size(self, axis: str) -> int:
        """Ranks along ``axis``."""
        return getattr(self, axis)

    @property
    def world_size(self) -> int:
        """All ranks of the grid."""
        return prod(self.size(axis) for axis in AXES)

    def coordinates(self, rank: int) -> dict[str, int]:
        """The index of ``rank`` on every axis."""
        if not 0 <= rank - self.rank_offset < self.world_size:
            raise LayoutError(f"rank {rank} is outside the grid of {self.world_size} ranks from {self.rank_offset}")
        rest, place = rank - self.rank_offset, dict.fromkeys(AXES, 0)
        for axis in self.order.split("-"):
            rest, place[axis] = divmod(rest, self.size(axis))
        return place

    def rank(self, **place: int) -> int:
        """The rank at the given indices; axes that are not named are at 0."""
        for axis, index in place.items():
            if axis not in AXES or not 0 <= index < self.size(axis):
                legal = f"0 to {self.size(axis) - 1}" if axis in AXES else f"one of the axes {', '.join(AXES)}"
                raise LayoutError(f"{axis}={index} is no place in the grid; legal: {legal}")
        rank, stride = self.rank_offset, 1
        for axis in self.order.split("-"):
            rank += stride * place.get(axis, 0)
            stride *= self.size(axis)
        return rank

    def ranks(self) -> Iterator[int]:
        """All ranks in ascending order."""
        return iter(range(self.rank_offset, self.rank_offset + self.world_size))

    def groups(self, axes: str) -> list[list[int]]:
        """Ranks that differ only on ``axes`` ("tp", "tp-dp", ...), each group and the list in ascending order."""
        names = self.order.split("-")
        sizes, mask = [self.size(axis) for axis in names], [axis in axes.split("-") for axis in names]
        found = generate_masked_orthogonal_rank_groups(self.world_size, sizes, mask)
        return [[self.rank_offset + rank for rank in ranks] for ranks in found]

    def group_of(self, rank: int, axes: str) -> list[int]:
        """The ranks that differ from ``rank`` only on ``axes``."""
        return next(group for group in self.groups(axes) if rank in group)


def generate_masked_orthogonal_rank_groups(
    world_size: int, parallel_size: Sequence[int], mask: Sequence[bool]
) -> list[list[int]]:
    """Ranks that differ only on the axes whose ``mask`` is True; ``parallel_size`` has the sizes, the fastest first.

    The name and arguments are Megatron Core's.
    """
    found: dict[tuple[int, ...], list[int]] = {}
    for rank in range(world_size):
        rest, fixed = rank, []
        for size, varies in zip(parallel_size, mask, strict=True):
            rest, index = divmod(rest, size)
            if not varies:
                fixed.append(index)
        found.setdefault((*fixed, rest), []).append(rank)
    return list(found.values())
