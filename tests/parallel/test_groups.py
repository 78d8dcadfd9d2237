"""Real process groups: a sum over each is the sum over the ranks computed by the grid."""

from __future__ import annotations

from itertools import chain, combinations

import pytest
import torch
import torch.distributed as dist

from megatron_core.errors import LayoutError
from megatron_core.parallel.grid import AXES, WORLD, Grid
from megatron_core.parallel.groups import COMBINATIONS, LocalGroup, ParallelGroups
from megatron_core.verify.ranks import run_ranks


def total(group: dist.ProcessGroup) -> int:
    """Sum over the group of 2^rank, which identifies its members."""
    x = torch.tensor(1 << dist.get_rank())
    dist.all_reduce(x, group=group)
    return int(x)


def members(ranks: list[int]) -> int:
    return sum(1 << rank for rank in ranks)


def _check(grids: list[Grid]) -> None:
    me = dist.get_rank()
    for grid in grids:
        groups = ParallelGroups(grid, me)
        assert groups.coordinates == grid.coordinates(me)
        for axes in COMBINATIONS:
            group, ranks = groups.group(axes), groups.ranks(axes)
            assert total(group) == members(ranks), (grid, axes)
            assert (group.size(), group.rank()) == (len(ranks), ranks.index(me))
        for axis in AXES:
            assert groups.group(axis).rank() == groups.index(axis)
            assert groups.group(axis).size() == groups.size(axis)
        _check_pipeline_groups(groups)
        _check_sharing(groups)


def _check_pipeline_groups(groups: ParallelGroups) -> None:
    pipeline = groups.ranks("pp")
    assert total(groups.reverse_pp) == members(pipeline)
    if len(pipeline) > 1:  # messages in both directions must not share a communicator
        assert groups.reverse_pp is not groups.group("pp")
    ends = sorted({pipeline[0], pipeline[-1]})
    if groups.rank in ends:
        assert groups.embedding_ranks == ends
        assert total(groups.embedding) == members(ends)
    else:
        assert groups.embedding is None
        assert groups.embedding_ranks == []


def _check_sharing(groups: ParallelGroups) -> None:
    """Combinations with the same ranks share a communicator, also across the two views."""
    for one, other in combinations(COMBINATIONS, 2):
        assert (groups.group(one) is groups.group(other)) == (groups.ranks(one) == groups.ranks(other)), (one, other)
    assert groups.group("cp-dp") is groups.group("dp-cp")


@pytest.mark.parametrize(
    ("world", "grids"),
    [
        (4, [Grid(tp=2, pp=2), Grid(pp=4), Grid(tp=2, dp=2, order="dp-tp-cp-ep-pp"), Grid(cp=2, dp=2)]),
        (8, [Grid(tp=2, dp=2, pp=2, ep=2), Grid(tp=2, cp=2, pp=2, ep=4, etp=1, order="pp-cp-tp-ep-dp")]),
    ],
    ids=["4 ranks", "8 ranks"],
)
def test_sums_over_every_group(world: int, grids: list[Grid]) -> None:
    run_ranks(world, _check, grids)


def _stands_alone() -> None:
    groups = ParallelGroups.single()
    made = [groups.group(axes) for axes in COMBINATIONS]
    for group in chain(made, [groups.embedding, groups.reverse_pp]):
        assert isinstance(group, LocalGroup)
        assert (group.size(), group.rank()) == (1, 0)
    assert groups.ranks("pp") == groups.embedding_ranks == [0]


def test_process_that_stands_alone() -> None:
    _stands_alone()
    run_ranks(2, _stands_alone)  # also in a job of several ranks


def test_rank_of_a_larger_world_without_torch_distributed() -> None:
    """Sizes and indices of any rank, to compute its state."""
    grid = Grid.fit(16_384, tp=8, cp=2, pp=16, ep=16, etp=1)
    groups = ParallelGroups(grid, 12_345, ends=(0, 0))
    for axes in COMBINATIONS:
        ranks = grid.group_of(12_345, axes)
        assert groups.group(axes) == LocalGroup(len(ranks), ranks.index(12_345))
    assert groups.group(WORLD) == LocalGroup(16_384, 12_345)
    assert groups.reverse_pp == LocalGroup(16, groups.index("pp"))
    assert groups.index("pp") > 0 and groups.embedding is None


def test_unknown_axes() -> None:
    with pytest.raises(LayoutError, match=r"'tp-ep'.*there are: tp, cp"):
        ParallelGroups.single().group("tp-ep")


def test_messages_begin_with_the_coordinates() -> None:
    assert ParallelGroups(Grid(tp=2, dp=2, pp=2), 7).prefix == "[pp1 dp1 tp1]"
