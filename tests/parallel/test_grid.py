"""Ranks and coordinates are inverse to each other, groups partition the world, and both equal Megatron's."""

from __future__ import annotations

from itertools import combinations, pairwise
from math import prod
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from megatron.core.parallel_state import RankGenerator
from megatron_core.errors import LayoutError
from megatron_core.parallel.grid import AXES, DEFAULT_ORDER, DENSE_AXES, EXPERT_AXES, WORLD, Grid

VIEWS = (DENSE_AXES, EXPERT_AXES)
ORDERS = st.permutations(DEFAULT_ORDER.split("-")).map("-".join)


@st.composite
def grids(draw: st.DrawFn) -> Grid:
    """Any grid of at most 48 ranks, with any valid expert sizes."""
    sizes = draw(st.fixed_dictionaries({axis: st.integers(1, 4) for axis in DENSE_AXES}))
    stage = sizes["tp"] * sizes["cp"] * sizes["dp"]
    assume(stage * sizes["pp"] <= 48)
    etp = draw(st.sampled_from([n for n in range(1, stage + 1) if stage % n == 0]))
    ep = draw(st.sampled_from([n for n in range(1, stage // etp + 1) if stage // etp % n == 0]))
    order = draw(ORDERS)
    try:
        return Grid(**sizes, ep=ep, etp=etp, order=order, rank_offset=draw(st.integers(0, 5)))
    except LayoutError as error:  # the pipelines of the two views would differ
        assert "neighbours of a pipeline" in str(error) and not order.endswith("pp")
        return Grid(**sizes, ep=ep, etp=etp, order=order.replace("-pp", "").replace("pp-", "") + "-pp")


@settings(deadline=None, max_examples=60)
@given(grids())
def test_rank_and_coordinates_are_inverse(grid: Grid) -> None:
    coordinates = [grid.coordinates(rank) for rank in grid.ranks()]
    for view in VIEWS:
        assert [grid.rank(**{axis: at[axis] for axis in view}) for at in coordinates] == list(grid.ranks())
        assert prod(grid.size(axis) for axis in view) == grid.world_size
    assert all(0 <= at[axis] < grid.size(axis) for at in coordinates for axis in AXES)


@settings(deadline=None, max_examples=60)
@given(grids())
def test_first_axis_of_the_order_is_the_fastest(grid: Grid) -> None:
    for names in ({"tp": "tp", "cp": "cp", "dp": "dp", "pp": "pp"}, {"tp": "etp", "ep": "ep", "dp": "edp", "pp": "pp"}):
        stride = 1
        for axis in (names[name] for name in grid.order.split("-") if name in names):
            assert all(b - a == stride for group in grid.groups(axis) for a, b in pairwise(group))
            stride *= grid.size(axis)


@settings(deadline=None, max_examples=60)
@given(grids())
def test_groups_of_each_view_partition_the_world(grid: Grid) -> None:
    for view in VIEWS:
        for axes in (chosen for n in range(1, len(view) + 1) for chosen in combinations(view, n)):
            groups = grid.groups("-".join(axes))
            assert sorted(rank for group in groups for rank in group) == list(grid.ranks())
            assert {len(group) for group in groups} == {prod(grid.size(axis) for axis in axes)}
            assert groups == sorted(sorted(group) for group in groups)
            for group in groups:
                fixed = {tuple(grid.coordinates(r)[axis] for axis in view if axis not in axes) for r in group}
                assert len(fixed) == 1
                assert grid.group_of(group[-1], "-".join(axes)) == group


@settings(deadline=None, max_examples=60)
@given(grids())
def test_views_are_megatrons_two_rank_generators(grid: Grid) -> None:
    shared = {"pp": grid.pp, "order": grid.order, "rank_offset": grid.rank_offset}
    dense = RankGenerator(tp=grid.tp, cp=grid.cp, dp=grid.dp, ep=1, **shared)
    expert = RankGenerator(tp=grid.size("etp"), ep=grid.ep, dp=grid.edp, cp=1, **shared)
    assert dense.get_ranks("pp") == expert.get_ranks("pp") == grid.groups("pp")
    for axes in ("tp", "cp", "dp", "tp-pp", "dp-cp", "tp-dp-cp", WORLD):
        assert grid.groups(axes) == dense.get_ranks(axes)
    for axes, token in (("etp", "tp"), ("ep", "ep"), ("edp", "dp"), ("etp-ep", "tp-ep"), ("etp-ep-pp", "tp-ep-pp")):
        assert grid.groups(axes) == expert.get_ranks(token)


def test_example_of_megatrons_documentation() -> None:
    """16 ranks, tensor 2, pipeline 4: the groups listed in Megatron-LM's ``initialize_model_parallel``."""
    grid = Grid.fit(16, tp=2, pp=4)
    assert grid.dp == 2
    assert grid.groups("tp") == [[r, r + 1] for r in range(0, 16, 2)]
    assert grid.groups("dp") == [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]]
    assert grid.groups("pp") == [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]]
    assert grid.groups("tp-pp") == [[0, 1, 4, 5, 8, 9, 12, 13], [2, 3, 6, 7, 10, 11, 14, 15]]


def test_megatrons_example_of_context_parallelism() -> None:
    """8 ranks, tensor 4, context 2: [g0, g4], [g1, g5], [g2, g6], [g3, g7] in Megatron-LM's documentation."""
    assert Grid.fit(8, tp=4, cp=2).groups("cp") == [[0, 4], [1, 5], [2, 6], [3, 7]]


# By hand from rank = tp + n_tp (ep + n_ep (dp + n_dp pp)) and so on: the pipeline is the slower axis, or data is.
FOLDED = {
    "experts over data, pipeline last": (
        {"world_size": 8, "tp": 2, "pp": 2, "ep": 2},
        {
            "ep": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "etp": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "edp": [[r] for r in range(8)],
        },
    ),
    "experts over tensor and data": (
        {"world_size": 8, "tp": 2, "ep": 4, "etp": 1},
        {
            "ep": [[0, 1, 2, 3], [4, 5, 6, 7]],
            "edp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "dp": [[0, 2, 4, 6], [1, 3, 5, 7]],
        },
    ),
    "experts over context": (
        {"world_size": 8, "cp": 2, "ep": 2, "etp": 2},
        {
            "cp": [[0, 1], [2, 3], [4, 5], [6, 7]],
            "ep": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "edp": [[0, 4], [1, 5], [2, 6], [3, 7]],
        },
    ),
    "data slower than the pipeline": (
        {"world_size": 8, "tp": 2, "pp": 2, "order": "tp-cp-ep-pp-dp"},
        {
            "pp": [[0, 2], [1, 3], [4, 6], [5, 7]],
            "dp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "edp": [[0, 4], [1, 5], [2, 6], [3, 7]],
            "etp-ep-pp": [[0, 1, 2, 3], [4, 5, 6, 7]],
        },
    ),
    "experts with a pipeline that is faster than data": (
        {"world_size": 16, "tp": 2, "pp": 2, "ep": 2, "etp": 1, "order": "tp-cp-ep-pp-dp"},
        {
            "pp": [[0, 2], [1, 3], [4, 6], [5, 7], [8, 10], [9, 11], [12, 14], [13, 15]],
            "ep": [[r, r + 1] for r in range(0, 16, 2)],
            "edp": [[0, 4, 8, 12], [1, 5, 9, 13], [2, 6, 10, 14], [3, 7, 11, 15]],
        },
    ),
}


@pytest.mark.parametrize(("sizes", "expected"), FOLDED.values(), ids=FOLDED)
def test_folded_groups_by_hand(sizes: dict[str, Any], expected: dict[str, list[list[int]]]) -> None:
    grid = Grid.fit(**sizes)
    assert {axes: grid.groups(axes) for axes in expected} == expected


def test_group_of_a_rank_among_16384() -> None:
    grid = Grid.fit(16_384, tp=8, cp=16, pp=16, ep=64, etp=1)
    at = grid.coordinates(12_345)
    assert (grid.dp, grid.edp) == (8, 16)
    assert grid.group_of(12_345, "tp") == list(range(12_344, 12_352))
    assert [grid.coordinates(rank)["pp"] for rank in grid.group_of(12_345, "pp")] == list(range(16))
    assert grid.group_of(12_345, "edp").index(12_345) == at["edp"]


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
        ({"order": "tp-pp", "dp": 2}, "lacks 'dp'; add it, for dp=2"),
        ({"order": "tp-pp", "tp": 2, "etp": 1}, "lacks 'dp'; add it, for edp=2"),
        ({"tp": 0}, "tp=0"),
        ({"pp": -1}, "pp=-1"),
        ({"etp": 0}, "etp=0"),
        (
            {"tp": 2, "dp": 3, "ep": 2},
            "world size 6 cannot be divided by expert tensor x expert x pipeline = 2 x 2 x 1",
        ),
        ({"tp": 2, "dp": 2, "pp": 2, "etp": 1, "order": "tp-pp-dp"}, "2 ranks apart for dense .* and 1 for experts"),
    ],
)
def test_impossible_grids(settings: dict, told: str) -> None:
    with pytest.raises(LayoutError, match=told):
        Grid(**settings)


@pytest.mark.parametrize(("world", "sizes"), [(8, {"tp": 3}), (6, {"tp": 2, "pp": 2}), (1, {"tp": 2}), (4, {"tp": 0})])
def test_world_that_does_not_divide(world: int, sizes: dict) -> None:
    with pytest.raises(LayoutError, match=f"world size {world} cannot be divided"):
        Grid.fit(world, **sizes)


@pytest.mark.parametrize("axes", ["tp-ep", "etp-dp", "sp"])
def test_axes_of_no_view(axes: str) -> None:
    with pytest.raises(LayoutError, match=rf"axes {axes} belong to no view .*: some of tp, cp, dp, pp, or some of etp"):
        Grid(tp=2).groups(axes)


@pytest.mark.parametrize("rank", [-1, 3, 8])
def test_rank_outside_the_grid(rank: int) -> None:
    with pytest.raises(LayoutError, match=f"rank {rank} is outside"):
        Grid(tp=2, dp=2, rank_offset=4).coordinates(rank)
