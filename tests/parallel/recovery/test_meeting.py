"""The agreement after a failure, with a store in this process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_core.config.layout import Layout
from megatron_core.parallel import interrupt
from megatron_core.parallel.recovery.meeting import End, Failure, Meeting
from megatron_core.training.recovery import whole_replicas
from tests.runs import tiny_config


def meetings(size: int) -> list[Meeting]:
    """The view of each rank."""
    store = dist.HashStore()
    return [Meeting(store, rank, size) for rank in range(size)]


def test_the_first_failure_of_a_generation_counts() -> None:
    first, second = meetings(2)
    assert first.next_generation(0) == 0
    first.fail(0, Failure(0, "rank 0 was killed", 7))
    second.fail(0, Failure(1, "rank 1 lost rank 0", 7))
    found = second.failure(0)
    assert found is not None and (found.rank, found.what, found.iteration) == (0, "rank 0 was killed", 7)
    assert second.next_generation(0) == 1 and second.failure(1) is None


def test_members_are_decided_once_with_the_newest_common_iteration() -> None:
    ranks = meetings(3)
    ranks[0].arrive(1, [4, 5], fresh=False)
    ranks[1].arrive(1, [3, 4], fresh=True)
    assert ranks[0].members(1) is None and ranks[0].absent(1) == [2]
    ranks[2].arrive(1, [4, 5], fresh=False)
    found = ranks[2].members(1)
    assert found is not None and (found.ranks, found.iteration, found.fresh) == ((0, 1, 2), 4, (1,))
    ranks[1].arrive(1, [9], fresh=False)  # too late to change it
    assert ranks[1].members(1) == found


def test_without_a_common_iteration_training_starts_again() -> None:
    first, second = meetings(2)
    first.arrive(1, [0], fresh=False)
    second.arrive(1, [], fresh=True)
    found = first.members(1)
    assert found is not None and found.iteration == -1


def test_lost_ranks_are_not_awaited() -> None:
    first, second = meetings(2)
    first.arrive(1, [2], fresh=False)
    assert first.members(1) is None
    second.lose(1)
    found = first.members(1)
    assert found is not None and found.ranks == (0,)


def test_the_first_end_of_the_job_counts() -> None:
    first, second = meetings(2)
    assert first.ended() is None
    second.end(75, "a host is lost")
    first.end(0, "the job is complete")
    assert first.ended() == End(75, "a host is lost")


def test_supervisors_are_watched_in_a_ring_until_they_leave() -> None:
    ranks = meetings(3)
    assert ranks[2].watched() == (0, 0)
    ranks[0].beat()
    assert ranks[2].watched() == (0, 1)
    ranks[0].leave()
    assert ranks[2].watched() == (1, 0)
    assert not ranks[2].all_left()
    ranks[1].leave()
    ranks[1].leave(2)
    assert ranks[0].all_left() and ranks[2].watched() is None


@pytest.mark.parametrize(
    ("layout", "alive", "expected"),
    [
        ("dp2", (0, 1), (0, 1)),
        ("dp2", (1,), (1,)),
        ("tp2 dp2", (0, 1, 3), (0, 1)),
        ("tp2 dp2", (0, 2, 3), (2, 3)),
        ("tp2 dp2", (0, 3), ()),
        ("pp2 dp2", (0, 1, 2), (0, 2)),
        ("dp4", (0, 2, 3), (0, 2)),  # 4 micro-batches cannot be split over 3 ranks
    ],
)
def test_whole_replicas_continue(layout: str, alive: tuple[int, ...], expected: tuple[int, ...]) -> None:
    parsed = Layout.parse(layout)
    config = tiny_config(**parsed.settings())
    assert whole_replicas(config, parsed.world_size, alive) == expected


def test_a_wait_ends_only_while_an_end_is_requested() -> None:
    interrupt.check()
    interrupt.request("rank 3 was killed")
    try:
        with pytest.raises(interrupt.InterruptedWait, match="rank 3 was killed"):
            interrupt.check()
    finally:
        interrupt.withdraw()
    interrupt.check()


def test_a_recovery_names_all_failures_since_the_last_step() -> None:
    (meeting,) = meetings(1)
    for generation, what in enumerate(("first", "second", "third")):
        if generation < 2:
            meeting.train(generation)
        meeting.fail(generation, Failure(0, what, 1))
    assert [failure.what for failure in meeting.failures(3)] == ["second", "third"]
    assert [failure.what for failure in meeting.failures(1)] == ["first"]
