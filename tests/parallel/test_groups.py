"""Real process groups: a sum over each one is the sum over the ranks that the grid's arithmetic names."""

from __future__ import annotations

from itertools import chain

import pytest
import torch
import torch.distributed as dist

from megatron_core.errors import LayoutError
from megatron_core.parallel.grid import Grid
from megatron_core.parallel.groups import COMBINATIONS, LocalGroup, ParallelGroups
from megatron_core.verify.ranks import run_ranks


def total(group: dist.ProcessGroup) -> int:
    """Sum over the group of 2^rank, which names its members."""
    x = torch.tensor(1 << dist.get_rank())
    dist.all_reduce(x, group=group)
    return int(x)


def members(ranks: list[int]) -> int:
    return sum(1 << rank for rank in ranks)


def _check(grids: list[Grid]) -> None:
    me = dist.get_rank()
    for grid in grids:
        groups = ParallelGroups(grid, me)
        assert groups.place == grid.coordinates(me)
        for axes in COMBINATIONS:
            group, ranks = groups.group(axes), groups.ranks(axes)
            assert total(group) == members(ranks), (grid, axes)
            assert (group.size(), group.rank()) == (len(ranks), ranks.index(me))
        for axis in ("tp", "cp", "dp", "pp"):
            assert groups.group(axis).rank() == groups.index(axis)
            assert groups.group(axis).size() == groups.size(axis)
        _check_pipeline_groups(groups)


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


@pytest.mark.parametrize(
    ("world", "grids"),
    [
        (4, [Grid(tp=2, pp=2), Grid(pp=4), Grid(tp=2, dp=2, order="dp-tp-cp-ep-pp"), Grid(cp=2, dp=2)]),
        (8, [Grid(tp=2, dp=2, pp=2), Grid(tp=2, cp=2, pp=2, order="pp-cp-tp-ep-dp")]),
    ],
    ids=["4 ranks", "8 ranks"],
)
def test_sums_over_every_group(world: int, grids: list[Grid]) -> None:
    run_ranks(world, _check, grids)


def test_process_that_stands_alone() -> None:
    groups = ParallelGroups.single()
    made = [groups.group(axes) for axes in COMBINATIONS]
    for group in chain(made, [groups.embedding, groups.reverse_pp]):
        assert isinstance(group, LocalGroup)
        assert (group.size(), group.rank()) == (1, 0)
    assert groups.ranks("pp") == groups.embedding_ranks == [0]


def test_unknown_axes() -> None:
    with pytest.raises(LayoutError, match=r"'tp-ep'.*there are: tp, cp"):
        ParallelGroups.single().group("tp-ep")


def test_messages_begin_with_the_place() -> None:
    assert ParallelGroups(Grid(tp=2, dp=2, pp=2), 7).prefix == "[pp1 dp1 tp1]"
