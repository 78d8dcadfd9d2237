"""Small worlds of processes."""

from __future__ import annotations

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from megatron_core.verify.ranks import RankFailure, run_ranks, this_world


def rank_and_sum() -> tuple[int, int, float, int]:
    world = this_world()
    total = torch.tensor(float(world.rank))
    dist.all_reduce(total)
    return world.rank, world.size, total.item(), torch.get_num_threads()


@pytest.mark.parametrize("world_size", [1, 3])
def test_results_come_back_by_rank(world_size: int) -> None:
    total = sum(range(world_size))
    assert run_ranks(world_size, rank_and_sum) == [(rank, world_size, total, 1) for rank in range(world_size)]


def fail_on(rank: int) -> None:
    if dist.get_rank() == rank:
        raise ValueError("a bad day")
    dist.barrier()


def test_the_first_failure_is_told_with_its_traceback() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 1:\nTraceback.*fail_on.*ValueError: a bad day"):
        run_ranks(2, fail_on, 1)


def die() -> None:
    if dist.get_rank() == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


def test_a_rank_that_dies_is_named_at_once() -> None:
    with pytest.raises(RankFailure, match="rank 0 exited without a result"):
        run_ranks(2, die)


def test_ranks_that_hang_are_ended() -> None:
    with pytest.raises(RankFailure, match=r"ranks \[0\] did not finish within 1 s"):
        run_ranks(1, time.sleep, 60, timeout=1.0)


def leave_late() -> int:
    """Rank 0 ends long before the others have created their group."""
    if dist.get_rank():
        time.sleep(0.3)
        dist.barrier(dist.new_group([1, 2]))
    else:
        dist.new_group([1, 2])
    return dist.get_rank()


def test_quick_ranks_wait_for_slow_ones() -> None:
    assert run_ranks(3, leave_late) == [0, 1, 2]
