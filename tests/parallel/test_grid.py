"""Ranks and coordinates are inverse to one another, and groups partition the world."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import prod

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_core.errors import LayoutError
from megatron_core.parallel.grid import AXES, Grid

SIZES = st.fixed_dictionaries({axis: st.integers(1, 3) for axis in AXES}).filter(lambda n: prod(n.values()) <= 48)
ORDERS = st.permutations(AXES).map("-".join)
GRIDS = st.builds(
    lambda sizes, order, offset: Grid(**sizes, order=order, rank_offset=offset), SIZES, ORDERS, st.integers(0, 5)
)


@settings(deadline=None, max_examples=50)
@given(SIZES)
def test_default_order(sizes: dict[str, int]) -> None:
    """rank = tp + n_tp (cp + n_cp (ep + n_ep (dp + n_dp pp))): Megatron-LM's numbering."""
    grid = Grid(**sizes)
    for rank in grid.ranks():
        at = grid.coordinates(rank)
        inner = at["ep"] + sizes["ep"] * (at["dp"] + sizes["dp"] * at["pp"])
        assert rank == at["tp"] + sizes["tp"] * (at["cp"] + sizes["cp"] * inner)


@settings(deadline=None, max_examples=50)
@given(GRIDS)
def test_rank_and_coordinates_are_inverse(grid: Grid) -> None:
    places = [grid.coordinates(rank) for rank in grid.ranks()]
    assert [grid.rank(**place) for place in places] == list(grid.ranks())
    assert len({tuple(place.items()) for place in places}) == grid.world_size
    assert all(0 <= place[axis] < grid.size(axis) for place in places for axis in AXES)


@settings(deadline=None, max_examples=50)
@given(GRIDS)
def test_first_axis_of_the_order_is_the_fastest(grid: Grid) -> None:
    stride = 1
    for axis in grid.order.split("-"):
        assert all(b - a == stride for group in grid.groups(axis) for a, b in pairwise(group))
        stride *= grid.size(axis)


@settings(deadline=None, max_examples=50)
@given(GRIDS)
def test_groups_partition_the_world(grid: Grid) -> None:
    for axes in (chosen for n in range(1, len(AXES) + 1) for chosen in combinations(AXES, n)):
        groups = grid.groups("-".join(axes))
        assert sorted(rank for group in groups for rank in group) == list(grid.ranks())
        assert {len(group) for group in groups} == {prod(grid.size(axis) for axis in axes)}
        assert groups == sorted(sorted(group) for group in groups)
        for group in groups:
            fixed = {tuple(grid.coordinates(r)[axis] for axis in AXES if axis not in axes) for r in group}
            assert len(fixed) == 1
            assert grid.group_of(group[-1], "-".join(axes)) == group


def test_example_of_megatrons_documentation() -> None:
    """16 ranks, tensor 2, pipeline 4: the groups that Megatron-LM's ``initialize_model_parallel`` lists."""
    grid = Grid.fit(16, tp=2, pp=4)
    assert grid.dp == 2
    assert grid.groups("tp") == [[r, r + 1] for r in range(0, 16, 2)]
    assert grid.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert grid.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert grid.groups("tp-pp") == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]


def test_axes_of_size_one_may_be_left_out() -> None:
    grid = Grid(tp=2, pp=3, order="pp-tp")
    assert grid.groups("pp") == [[0, 1, 2], [3, 4, 5]]
    assert grid.rank(tp=1) == 3
    assert grid.groups("dp") == [[rank] for rank in range(6)]


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"order": "tp-xx-pp"}, "'xx'"),
        ({"order": "tp-pp-tp-dp"}, "twice"),
        ({"order": "tp-pp", "dp": 2}, "lacks 'dp', whose size is 2"),
        ({"tp": 0}, "tp=0"),
        ({"pp": -1}, "pp=-1"),
    ],
)
def test_impossible_grids(settings: dict, told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        Grid(**settings)


@pytest.mark.parametrize(("world", "sizes"), [(8, {"tp": 3}), (6, {"tp": 2, "pp": 2}), (1, {"tp": 2}), (4, {"tp": 0})])
def test_world_that_does_not_divide(world: int, sizes: dict) -> None:
    with pytest.raises(LayoutError, match=f"world size {world} cannot be divided"):
        Grid.fit(world, **sizes)


@pytest.mark.parametrize("rank", [-1, 3, 8])
def test_rank_outside_the_grid(rank: int) -> None:
    with pytest.raises(LayoutError, match=f"rank {rank} is outside"):
        Grid(tp=2, dp=2, rank_offset=4).coordinates(rank)
