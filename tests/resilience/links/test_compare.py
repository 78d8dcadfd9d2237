"""The comparison of recorded calls: calls that are not complete on all ranks wait for a later comparison."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD, Grid
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.resilience.link_checks import wrong_deliveries
from megatron_core.resilience.links.checksums import maxima
from megatron_core.resilience.links.recorder import LINKS, RecordedCall
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
    """Keys that are left after each of three steps whose first call has no ``wait``."""
    groups = ParallelGroups(Grid(dp=2), dist.get_rank())
    found = []
    LINKS.forget()
    for step in range(1, 4):
        LINKS.begin(step)
        all_reduce_(torch.ones(3), groups.group(WORLD))
        call: RecordedCall = LINKS.calls[groups.group(WORLD)][-1]
        call.complete = False
        assert wrong_deliveries(groups, CPU) == []
        found.append([call.key for call in LINKS.calls[groups.group(WORLD)]])
    LINKS.forget()
    return found


def test_calls_that_never_end_do_not_accumulate() -> None:
    assert run_ranks(2, _left_after_steps)[0] == [[(1, 1)], [(1, 1), (2, 1)], [(2, 1), (3, 1)]]


def _maxima_with_nans() -> list[str]:
    """Findings in maxima of inputs with and without NaNs, and in one to which a NaN is added; ranks 4 and 6 of the
    launcher."""
    groups = ParallelGroups(Grid(dp=2), dist.get_rank())
    found = []
    for number, spoiled in enumerate((False, False, True)):
        LINKS.forget()
        LINKS.begin(1)
        x = torch.full((8,), -1.0)
        if number == 0 and dist.get_rank() == 0:
            x[::2] = torch.nan
        all_reduce_(x, groups.group(WORLD), maximum=True)
        if spoiled and dist.get_rank() == 0:
            LINKS.calls[groups.group(WORLD)][0].received[0] = maxima(torch.tensor([-1.0, torch.nan]), 1)
        found.append(" ".join(wrong_deliveries(groups, CPU, (4, 6).__getitem__)))
    LINKS.forget()
    return found


@pytest.mark.parametrize("backend", ["auto", "gloo"])
def test_nans_in_maxima(backend: str) -> None:
    given, none, new = run_ranks(2, _maxima_with_nans, backend=backend)[1]
    assert given == none == ""
    assert new.startswith("step 1: rank 4 received wrong values in all-reduce of [8] float32, call 1 over dp"), new
    assert "(ranks 4, 6)" in new
