"""The agreement after a failure, with a store in this process."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from megatron_core.cpu_ranks import interrupt
from megatron_core.planner.layout import Layout
from megatron_core.resilience.processes.memory import Copy
from megatron_core.resilience.processes.rendezvous import LOST_STATE, NO_STATE, End, Failure, Members, Rendezvous
from megatron_core.resilience.recovery_choice import (
    choice_of,
    groups_left_out,
    groups_that_join,
    has_all_parts,
    training_ranks,
)
from tests.runs import tiny_config


def rendezvous_of_ranks(size: int) -> list[Rendezvous]:
    """The view of each rank."""
    store = dist.HashStore()
    return [Rendezvous(store, rank, size) for rank in range(size)]


def test_the_first_failure_of_a_generation_counts() -> None:
    first, second = rendezvous_of_ranks(2)
    assert first.next_generation(0) == 0
    first.fail(0, Failure(0, "rank 0 was killed", 7))
    second.fail(0, Failure(1, "rank 1 lost rank 0", 7))
    found = second.failure(0)
    assert found is not None and (found.rank, found.what, found.iteration) == (0, "rank 0 was killed", 7)
    assert second.next_generation(0) == 1 and second.failure(1) is None


def copies(owner: int, *iterations: int, written: int = 0) -> list[Copy]:
    """Copies of the state of ``owner``."""
    return [Copy(owner, iteration, written) for iteration in iterations]


def begun(size: int) -> list[Rendezvous]:
    """The views after the first rendezvous, in which all ranks had no state."""
    ranks = rendezvous_of_ranks(size)
    for rank in ranks:
        rank.arrive(0, [], fresh=False)
    found = ranks[0].members(0)
    assert found is not None and (found.iteration, found.training) == (NO_STATE, tuple(range(size)))
    return ranks


def test_members_are_decided_once_with_the_newest_common_iteration() -> None:
    ranks = begun(3)
    ranks[0].arrive(1, copies(0, 4, 5), fresh=False)
    ranks[1].arrive(1, copies(1, 3, 4), fresh=True)
    assert ranks[0].members(1) is None and ranks[0].absent(1) == [2]
    ranks[2].arrive(1, copies(2, 4, 5), fresh=False)
    found = ranks[2].members(1)
    assert found is not None and (found.ranks, found.iteration, found.fresh) == ((0, 1, 2), 4, (1,))
    assert found.holders == {0: 0, 1: 1, 2: 2}
    ranks[1].arrive(1, copies(1, 9), fresh=False)  # too late to change it
    assert ranks[1].members(1) == found


def test_without_a_common_iteration_training_starts_again() -> None:
    first, second = begun(2)
    first.arrive(1, copies(0, 0), fresh=False)
    second.arrive(1, [], fresh=True)
    found = first.members(1)
    assert found is not None and found.iteration == NO_STATE


def test_a_lost_rank_is_not_awaited_and_its_memory_is_used() -> None:
    first, second = begun(2)
    first.arrive(1, copies(0, 2, 3), fresh=False)
    assert first.members(1) is None
    second.lose(1, copies(1, 1, 2))
    found = first.members(1)
    assert found is not None and (found.training, found.iteration, found.holders) == ((0,), 2, {0: 0, 1: 1})


def test_a_mirror_takes_the_place_of_a_lost_memory() -> None:
    ranks = begun(3)
    ranks[2].lose(1)
    ranks[0].arrive(1, [*copies(0, 6, 7), *copies(1, 6)], fresh=False)
    ranks[2].arrive(1, [*copies(2, 6, 7), *copies(0, 6)], fresh=False)
    found = ranks[0].members(1)
    assert found is not None and (found.iteration, found.holders) == (6, {0: 0, 1: 0, 2: 2})


def test_state_without_a_copy_is_not_replaced_by_a_new_start() -> None:
    first, second = begun(2)
    first.lose(1)
    first.arrive(1, copies(0, 6, 7), fresh=False)
    found = second.members(1)
    assert found is not None and found.iteration == LOST_STATE


def test_a_group_that_stood_aside_starts_with_the_state_of_the_others() -> None:
    """Its own copy is old; the batch is for two of four groups."""
    groups = {"outer_steps": 2, "outer_groups": 4, "global_batch_size": 8, "micro_batch_size": 1}
    config = tiny_config(**groups, recover="in-process", recover_without_spare=True)
    store, choice = dist.HashStore(), choice_of(config, 4)
    ranks = [Rendezvous(store, rank, 4, choice) for rank in range(4)]
    for rank in ranks:
        rank.arrive(0, [], fresh=False)
    assert ranks[0].members(0) is not None
    ranks[0].lose(3)
    for number in range(3):
        ranks[number].arrive(1, copies(number, 5), fresh=False)
    found = ranks[0].members(1)
    assert found is not None and (found.training, found.iteration) == ((0, 1), 5)
    ranks[0].lose(1)
    ranks[0].arrive(2, copies(0, 10, written=1), fresh=False)
    ranks[2].arrive(2, copies(2, 5), fresh=False)
    found = ranks[0].members(2)
    assert found is not None and (found.ranks, found.training, found.iteration) == ((0, 2), (0, 2), 10)
    assert groups_left_out(config, 4, found.training) == [1, 3] and groups_that_join(config, 4, found) == {2: 0}
    assert groups_left_out(tiny_config(), 4, (1, 2, 3)) == [], "without groups none is left out"


def test_copies_of_two_layouts_are_not_mixed() -> None:
    ranks = begun(3)
    ranks[0].lose(2, copies(2, 5))
    for rank in ranks[:2]:
        rank.arrive(1, copies(rank.rank, 5), fresh=False)
    assert ranks[0].members(1) is not None
    # Rank 1 fails before its first copy in the new layout.
    ranks[0].arrive(2, [Copy(0, 5, 0), Copy(0, 5, 1)], fresh=False)
    ranks[1].arrive(2, copies(1, 5), fresh=False)
    found = ranks[1].members(2)
    assert found is not None and (found.iteration, found.written, set(found.holders)) == (5, 0, {0, 1, 2})


def test_copies_after_a_rollback_count() -> None:
    """Rank 0 has a copy of a later iteration before the rollback, and rank 1 one of the same iteration."""
    ranks = begun(2)
    ranks[0].arrive(1, [Copy(0, 9, 0), Copy(0, 5, 0, rollbacks=1)], fresh=False)
    ranks[1].arrive(1, [Copy(1, 5, 0), Copy(0, 9, 0), Copy(1, 9, 0), Copy(1, 5, 0, rollbacks=1)], fresh=False)
    found = ranks[0].members(1)
    assert found is not None and found.copies == [Copy(0, 5, 0, rollbacks=1), Copy(1, 5, 0, rollbacks=1)]


def test_copies_of_wrong_values_do_not_count() -> None:
    """Neither own copies, mirrors nor those of a lost rank, also if another failure was published before."""
    ranks = begun(3)
    ranks[0].fail(0, Failure(0, "rank 0 was killed", 8))
    ranks[1].fail(0, Failure(1, "rank 2 computed wrong values", 8, first=7, ranks=(2,)))
    ranks[2].lose(2, copies(2, 6, 7))
    ranks[0].arrive(1, [*copies(0, 6, 7), *copies(1, 6, 7)], fresh=False)
    ranks[1].arrive(1, [*copies(1, 6, 7), *copies(2, 6, 7)], fresh=False)
    found = ranks[0].members(1)
    assert found is not None and (found.iteration, found.training) == (6, (0, 1))
    wrong = ranks[2].wrong(0)
    assert wrong is not None and (wrong.first, wrong.ranks) == (7, (2,))
    # The repeated step is right.
    ranks[0].arrive(2, copies(0, 6, 7, written=1), fresh=False)
    ranks[1].arrive(2, copies(1, 7, written=1), fresh=False)
    found = ranks[1].members(2)
    assert found is not None and (found.iteration, found.written) == (7, 1)


def test_a_rank_that_joins_is_expected_at_the_next_meeting() -> None:
    first, second = begun(2)
    second.lose(1)
    first.arrive(1, [], fresh=False)
    assert first.count_joins() == 0
    second.ask_to_join()
    assert first.count_joins() == 1 and first.joining() == [1]
    first.replace(1, 8, "rank 1 joins")
    first.take_in([1])
    assert not second.is_lost(1) and second.next_generation(1) == 2 and first.joining() == []
    assert first.replaced(1) == (8, "rank 1 joins")
    first.arrive(2, [], fresh=False)
    assert first.absent(2) == [1]


def test_the_first_end_of_the_job_counts() -> None:
    first, second = rendezvous_of_ranks(2)
    assert first.ended() is None
    second.end(75, "a host is lost")
    first.end(0, "the job is complete")
    assert first.ended() == End(75, "a host is lost")


def test_supervisors_are_watched_in_a_ring_until_they_leave() -> None:
    ranks = rendezvous_of_ranks(3)
    assert ranks[2].watched() == {0: 0}
    ranks[0].beat()
    assert ranks[2].watched() == {0: 1} and ranks[1].watched(5) == {2: 0, 0: 1}
    ranks[0].leave()
    assert ranks[2].watched() == {1: 0}
    assert not ranks[2].all_left()
    ranks[1].leave()
    ranks[1].leave(2)
    assert ranks[0].all_left() and ranks[2].watched() == {}


@pytest.mark.parametrize(
    ("layout", "alive", "expected"),
    [
        ("dp2", (0, 1), (0, 1)),
        ("dp2", (1,), (1,)),
        ("tp2 dp2", (0, 1, 3), (0, 1)),
        ("tp2 dp2", (0, 2, 3), (2, 3)),
        ("tp2 dp2", (0, 3), (0, 3)),  # of two replicas
        ("tp2 dp2", (3,), ()),
        ("tp2 dp4", (0, 2, 3, 5, 7), (0, 2, 3, 5)),
        ("pp2 dp2", (0, 1, 2), (0, 2)),
        ("dp2 ep2", (0,), ()),  # the experts of the other rank have no place
        ("dp4 ep2", (0, 2, 3), (0, 2)),
        ("dp4", (0, 2, 3), (0, 2)),  # 4 micro-batches cannot be split over 3 ranks
    ],
)
def test_whole_replicas_continue_first(layout: str, alive: tuple[int, ...], expected: tuple[int, ...]) -> None:
    parsed = Layout.parse(layout)
    config = tiny_config(**parsed.settings(), num_experts=4 if parsed.ep > 1 else None)
    assert training_ranks(config, parsed.world_size, alive) == expected


@pytest.mark.parametrize(
    ("layout", "owners", "expected"),
    [
        ("tp2 dp2", (0, 3), True),
        ("tp2 dp2", (1, 3), False),
        ("cp2 dp2", (2,), True),
        ("pp2 dp2", (0, 1), False),
        ("dp2 zero1", (0,), False),
        ("dp2 zero1", (0, 1), True),
        ("cp2 dp2 zero2", (0, 1, 2), False),
        ("dp2 ep2", (1,), False),
    ],
)
def test_copies_that_are_the_whole_state(layout: str, owners: tuple[int, ...], expected: bool) -> None:
    parsed = Layout.parse(layout)
    settings = {"num_experts": 4, "disable_bias_linear": True} if "ep2" in layout else {}
    config = tiny_config(recover_without_spare=True, **parsed.settings(), **settings)
    assert has_all_parts(config, tuple(range(parsed.world_size)), owners) is expected


def test_a_wait_ends_only_while_an_end_is_requested() -> None:
    interrupt.raise_if_requested()
    interrupt.request("rank 3 was killed")
    try:
        with pytest.raises(interrupt.InterruptedWait, match="rank 3 was killed"):
            interrupt.raise_if_requested()
    finally:
        interrupt.withdraw()
    interrupt.raise_if_requested()


def test_a_recovery_names_all_failures_since_the_last_step() -> None:
    (rendezvous,) = rendezvous_of_ranks(1)
    for generation, what in enumerate(("first", "second", "third")):
        if generation < 2:
            rendezvous.train(generation)
        rendezvous.fail(generation, Failure(0, what, 1))
    assert [failure.what for failure in rendezvous.failures(3)] == ["second", "third"]
    assert [failure.what for failure in rendezvous.failures(1)] == ["first"]


def test_a_recovery_names_every_process_that_died() -> None:
    """Two processes of a generation, in any order; the first one is its failure."""
    ranks = rendezvous_of_ranks(3)
    ranks[2].die(0, Failure(2, "rank 2 was killed by SIGKILL", 4))
    ranks[0].die(0, Failure(0, "rank 0 ended with status 3", 4))
    ranks[1].fail(0, Failure(1, "rank 1 lost a connection", 4))
    (failure,) = ranks[1].failures(1)
    assert failure.rank == 2
    assert failure.what == "rank 2 was killed by SIGKILL and rank 0 ended with status 3"


@pytest.mark.parametrize(
    ("fresh", "text"),
    [
        ((), "no process died"),
        ((1,), "a new process takes the place of rank 1"),
        ((0, 2), "new processes take the place of ranks 0, 2"),
    ],
)
def test_replacements(fresh: tuple[int, ...], text: str) -> None:
    assert Members((0, 1, 2), (0, 1, 2), 3, 0, {}, fresh).replacements == text
