"""The groups of large layouts are those of the plain list of coordinates."""

from __future__ import annotations

import pytest

from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.grid import Grid
from megatron_core.parallel.groups import COMBINATIONS
from tests.plain.groups import coordinates, groups

GRIDS = {
    "64 ranks": ({"tp": 2, "cp": 2, "dp": 4, "pp": 4, "ep": 4, "etp": 2}, "tp-cp-ep-dp-pp"),
    "96 ranks, tp 3": ({"tp": 3, "cp": 1, "dp": 8, "pp": 4, "ep": 8, "etp": 1}, "tp-cp-ep-dp-pp"),
    "pipeline first": ({"tp": 4, "cp": 2, "dp": 2, "pp": 8, "ep": 2, "etp": 4}, "pp-tp-cp-ep-dp"),
    "data first": ({"tp": 2, "cp": 4, "dp": 6, "pp": 3, "ep": 4, "etp": 2}, "dp-cp-tp-ep-pp"),
    "512 ranks": ({"tp": 8, "cp": 2, "dp": 8, "pp": 4, "ep": 8, "etp": 2}, "tp-cp-ep-dp-pp"),
}


@pytest.mark.parametrize("name", GRIDS)
def test_groups(name: str) -> None:
    sizes, order = GRIDS[name]
    grid = Grid(**sizes, order=order)
    whole = sizes | {"edp": grid.edp}
    places = coordinates(whole, order)
    world = len(places)
    assert grid.world_size == world
    assert [grid.coordinates(rank) for rank in range(world)] == places
    for axes in COMBINATIONS:
        expected = groups(whole, order, axes)
        assert sorted(grid.groups(axes)) == expected, axes
        for ranks in expected:
            assert all(grid.group_of(rank, axes) == ranks for rank in ranks), axes


@pytest.mark.parametrize("name", ["64 ranks", "data first"])
def test_group_of_each_rank(name: str) -> None:
    """Sizes and indices of the groups that a process of a large world has."""
    sizes, order = GRIDS[name]
    grid = Grid(**sizes, order=order)
    for axes in ("tp", "dp-cp", "ep", "edp", "pp"):
        for ranks in groups(sizes | {"edp": grid.edp}, order, axes):
            for rank in ranks[:: max(len(ranks) // 2, 1)]:
                group = ParallelGroups(grid, rank).group(axes)
                assert (group.size(), group.rank()) == (len(ranks), ranks.index(rank)), (axes, rank)
