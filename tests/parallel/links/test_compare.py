"""The comparison of recorded calls: calls that are not complete on all ranks wait for a later comparison."""

from __future__ import annotations

import torch
import torch.distributed as dist

from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD, Grid
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.links.compare import wrong_deliveries
from megatron_core.parallel.links.recorder import LINKS, Call
from megatron_core.verify.ranks import run_ranks

CPU = torch.device("cpu")


def _compared(open_on_rank_0: set[int], open_on_rank_1: set[int]) -> list[list[tuple[int, int]]]:
    """Keys of the calls that are left after each of three comparisons; the last one finds all calls complete."""
    groups = ParallelGroups(Grid(dp=2), dist.get_rank())
    group = groups.group(WORLD)
    not_yet = (open_on_rank_0, open_on_rank_1)[dist.get_rank()]
    found: list[list[tuple[int, int]]] = []

    def compare() -> None:
        assert wrong_deliveries(groups, CPU) == []
        found.append([call.key for call in LINKS.calls.get(group, [])])

    def record(count: int) -> None:
        for _ in range(count):
            all_reduce_(torch.ones(3), group)
        for call in LINKS.calls[group]:
            call.complete = call.number not in not_yet

    LINKS.forget()
    LINKS.begin(1)
    record(7)
    compare()
    LINKS.begin(2)
    record(20)
    compare()
    for call in LINKS.calls.get(group, []):
        call.complete = True
    compare()
    LINKS.forget()
    return found


def test_incomplete_calls_may_leave_gaps() -> None:
    for found in run_ranks(2, _compared, {3, 7, 20}, {3, 7, 20}):
        assert found == [[(1, 3), (1, 7)], [(1, 3), (1, 7), (2, 3), (2, 7), (2, 20)], []]


def test_a_call_waits_for_all_ranks() -> None:
    for found in run_ranks(2, _compared, {3}, {7, 20}):
        assert found == [[(1, 3), (1, 7)], [(1, 3), (1, 7), (2, 3), (2, 7), (2, 20)], []]


def _left_after_steps() -> list[list[tuple[int, int]]]:
    """Keys that are left after each of three steps in which nobody waits for the first call."""
    groups = ParallelGroups(Grid(dp=2), dist.get_rank())
    found = []
    LINKS.forget()
    for step in range(1, 4):
        LINKS.begin(step)
        all_reduce_(torch.ones(3), groups.group(WORLD))
        call: Call = LINKS.calls[groups.group(WORLD)][-1]
        call.complete = False
        assert wrong_deliveries(groups, CPU) == []
        found.append([call.key for call in LINKS.calls[groups.group(WORLD)]])
    LINKS.forget()
    return found


def test_calls_that_never_end_do_not_accumulate() -> None:
    assert run_ranks(2, _left_after_steps)[0] == [[(1, 1)], [(1, 1), (2, 1)], [(2, 1), (3, 1)]]
