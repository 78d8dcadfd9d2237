"""Mapping between ranks and coordinates: integer arithmetic only, no torch."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import product

from megatron_core.errors import LayoutError

DENSE_AXES = ("tp", "cp", "dp", "pp")
EXPERT_AXES = ("etp", "ep", "edp", "pp")
AXES = (*DENSE_AXES, "etp", "ep", "edp")
DEFAULT_ORDER = "tp-cp-ep-dp-pp"
WORLD = "-".join(DENSE_AXES)
"""The axes of the group of all ranks."""

# The axis that each name in ``order`` stands for, in the dense and in the expert view.
_VIEWS = (dict(zip(DENSE_AXES, DENSE_AXES, strict=True)), dict(zip(("tp", "ep", "dp", "pp"), EXPERT_AXES, strict=True)))


@dataclass(frozen=True)
class Grid:
    """Two views of the same ranks: dense layers use the axes tp, cp, dp, pp and expert layers etp, ep, edp, pp.

    A pipeline stage has tp x cp x dp = etp x ep x edp ranks (Liu et al. 2025, "MoE Parallel Folding"). In each view,
    with sizes n0, n1, ... of its axes from fastest to slowest in ``order``: rank = rank_offset + i0 + n0 (i1 + n1
    (i2 + ...)). In the expert view "tp" and "dp" stand for etp and edp. ``etp`` defaults to ``tp``.

    ``LayoutError``: a size or the order is impossible.
    """

    # The default order and the two views are Megatron-LM's (Narayanan et al. 2021, section 3), so that ranks of both
    # hold the same parts and checkpoints and launch scripts carry over.

    tp: int = 1
    cp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int | None = None
    order: str = DEFAULT_ORDER
    rank_offset: int = 0

    def __post_init__(self) -> None:
        if self.etp is None:
            object.__setattr__(self, "etp", self.tp)
        for axis in (*DENSE_AXES, "ep", "etp"):
            if self.size(axis) < 1:
                raise LayoutError(f"{axis}={self.size(axis)} must be at least 1")
        experts = self.size("etp") * self.ep * self.pp
        if self.world_size % experts:
            raise LayoutError(
                f"world size {self.world_size} cannot be divided by expert tensor x expert x pipeline = {self.etp} x "
                f"{self.ep} x {self.pp} = {experts}; start a multiple of {experts} ranks or choose smaller sizes"
            )
        self._check_order()

    def _check_order(self) -> None:
        axes = self.order.split("-")
        legal = DEFAULT_ORDER.split("-")
        for axis in axes:
            if axis not in legal:
                raise LayoutError(f"rank_order={self.order!r} names the axis {axis!r}; legal: {', '.join(legal)}")
        if len(set(axes)) != len(axes):
            raise LayoutError(f"rank_order={self.order!r} names an axis twice; name each of {DEFAULT_ORDER} once")
        # An axis without a place in the order would have no stride, and several ranks the same coordinates.
        for view in _VIEWS:
            for name, axis in view.items():
                if self.size(axis) > 1 and name not in axes:
                    raise LayoutError(f"rank_order={self.order!r} lacks {name!r}; add it, for {axis}={self.size(axis)}")
        # Both views must have the same pipelines: a rank holds the dense and the expert layers of one stage.
        dense, expert = (self._strides_of(view)["pp"] for view in _VIEWS)
        if self.pp > 1 and dense != expert:
            raise LayoutError(
                f"rank_order={self.order!r} puts neighbours of a pipeline {dense} ranks apart for dense layers (tp="
                f"{self.tp}, cp={self.cp}, dp={self.dp}) and {expert} for experts (etp={self.etp}, ep={self.ep}, edp="
                f"{self.edp}); put pp last, or make the sizes of the axes before pp multiply to the same number"
            )

    @classmethod
    def fit(
        cls,
        world_size: int,
        *,
        tp: int = 1,
        cp: int = 1,
        pp: int = 1,
        ep: int = 1,
        etp: int | None = None,
        order: str = DEFAULT_ORDER,
    ) -> "Grid":
        """The grid of ``world_size`` ranks for a model split tp x cp x pp ways; dp is the rest."""
        model = tp * cp * pp
        if model < 1 or world_size % model:
            raise LayoutError(
                f"world size {world_size} cannot be divided by tensor x context x pipeline = {tp} x {cp} x {pp} = "
                f"{model}; start a multiple of {model} ranks or choose smaller sizes"
            )
        return cls(tp=tp, cp=cp, dp=world_size // model, pp=pp, ep=ep, etp=etp, order=order)

    def size(self, axis: str) -> int:
        """Number of ranks along ``axis``."""
        return getattr(self, axis)

    @property
    def world_size(self) -> int:
        """Number of ranks in the grid."""
        return self.tp * self.cp * self.dp * self.pp

    @property
    def edp(self) -> int:
        """Number of replicas of each expert."""
        return self.world_size // (self.size("etp") * self.ep * self.pp)

    def _strides_of(self, view: dict[str, str]) -> dict[str, int]:
        """Rank distance between neighbours on each axis of a view."""
        # Axes missing from ``order`` have size 1, so any stride is right; pp must exist for the comparison of both
        # views.
        strides = {"pp": 1}
        stride = 1
        for name in self.order.split("-"):
            if name in view:
                strides[view[name]] = stride
                stride *= self.size(view[name])
        return strides

    @cached_property
    def _strides(self) -> dict[str, int]:
        return dict.fromkeys(AXES, 1) | self._strides_of(_VIEWS[0]) | self._strides_of(_VIEWS[1])

    def coordinates(self, rank: int) -> dict[str, int]:
        """Index of ``rank`` on every axis of both views."""
        if not 0 <= rank - self.rank_offset < self.world_size:
            raise LayoutError(f"rank {rank} is outside the grid of {self.world_size} ranks from {self.rank_offset}")
        # A rank is a number in mixed radix; its digits are the coordinates.
        return {axis: (rank - self.rank_offset) // self._strides[axis] % self.size(axis) for axis in AXES}

    def rank(self, **coordinates: int) -> int:
        """The rank at the given indices on axes of one view; omitted axes have index 0."""
        self._view_of(coordinates)
        for axis, index in coordinates.items():
            if not 0 <= index < self.size(axis):
                raise LayoutError(f"{axis}={index} is outside the grid; legal: 0 to {self.size(axis) - 1}")
        return self.rank_offset + sum(index * self._strides[axis] for axis, index in coordinates.items())

    def ranks(self) -> range:
        """All ranks in ascending order."""
        return range(self.rank_offset, self.rank_offset + self.world_size)

    def groups(self, axes: str) -> list[list[int]]:
        """Groups of ranks that differ only on ``axes`` of one view ("tp", "tp-dp", "etp-ep", ...), in ascending
        order."""
        return [list(ranks) for ranks in self.constant_groups(axes)]

    def constant_groups(self, axes: str) -> tuple[tuple[int, ...], ...]:
        """``groups``, computed once for all ranks of a process."""
        return _groups(self, axes)

    def group_of(self, rank: int, axes: str) -> list[int]:
        """Ranks that differ from ``rank`` only on ``axes``, computed without listing other groups."""
        names = axes.split("-")
        coordinates = self.coordinates(rank)
        self._view_of(names)
        # Every process computes this for each of its groups, so the cost must not grow with the number of ranks.
        first = rank - sum(coordinates[axis] * self._strides[axis] for axis in names)
        return [first + offset for offset in self._offsets(names)]

    def _offsets(self, axes: Sequence[str]) -> list[int]:
        """Rank offsets of the members of a group over ``axes`` from its first rank, in ascending order."""
        steps = [[index * self._strides[axis] for index in range(self.size(axis))] for axis in axes]
        return sorted(map(sum, product(*steps)))

    def _view_of(self, axes: Sequence[str] | dict[str, int]) -> tuple[str, ...]:
        """The axes of the view that contains all of ``axes``."""
        for view in (DENSE_AXES, EXPERT_AXES):
            if set(axes) <= set(view):
                return view
        raise LayoutError(
            f"the axes {'-'.join(axes)} belong to no view of the ranks; legal: some of {', '.join(DENSE_AXES)}, or "
            f"some of {', '.join(EXPERT_AXES)}"
        )


@cache
def _groups(grid: Grid, axes: str) -> tuple[tuple[int, ...], ...]:
    """Each rank of a simulated world reads all groups."""
    names = axes.split("-")
    other_axes = [axis for axis in grid._view_of(names) if axis not in names]
    offsets = grid._offsets(names)
    return tuple(tuple(grid.rank_offset + first + offset for offset in offsets) for first in grid._offsets(other_axes))
