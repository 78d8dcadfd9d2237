"""Ranks that die, hang or call wrong operations; missing shared memory; no leftovers."""

from __future__ import annotations

import multiprocessing as mp
import os
import random
import resource
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from megatron_core.cpu_ranks.shared_memory import backend, host
from megatron_core.cpu_ranks.shared_memory.group import SharedMemoryGroup
from megatron_core.errors import LayoutError
from megatron_core.parallel.exit_status import LostRankError
from megatron_core.parallel.launch import join
from megatron_core.verify.ranks import run_ranks
from tests.sample import WHOLE_MATRIX


def error_of(action: Callable[[], object], kind: type[Exception] = LostRankError) -> tuple[str, float]:
    """Its exception, and the seconds until it was raised."""
    began = time.monotonic()
    with pytest.raises(kind) as caught:
        action()
    return str(caught.value), time.monotonic() - began


def wait_for_a_rank_that_hangs() -> tuple[str, float]:
    group = dist.new_group([0, 2], timeout=timedelta(seconds=0.5))
    if dist.get_rank() == 2:
        time.sleep(1.5)
        return "", 0.0
    return error_of(lambda: dist.all_reduce(torch.ones(3), group=group)) if dist.get_rank() == 0 else ("", 0.0)


def test_a_rank_that_hangs_is_named_when_time_is_over() -> None:
    text, seconds = run_ranks(3, wait_for_a_rank_that_hangs)[0]
    assert "all-reduce over ranks [0, 2]: rank 2 (process" in text and "did not join within" in text
    assert "distributed_timeout_minutes" in text
    assert 0.4 < seconds < 30


ENDINGS: dict[str, Callable[[], object]] = {
    "all-reduce": lambda: dist.all_reduce(torch.ones(3)),
    "barrier": dist.barrier,
    "receive": lambda: dist.recv(torch.ones(3), 1),
}


@pytest.mark.parametrize("ending", ENDINGS)
def test_a_rank_that_was_killed_is_named_at_once(ending: str, tmp_path: Path) -> None:
    """Rank 0 waits for rank 1, which dies."""

    def use() -> tuple[str, float]:
        if dist.get_rank() == 1:
            time.sleep(0.2)
            os.kill(os.getpid(), signal.SIGKILL)
        return error_of(ENDINGS[ending])

    text, seconds = run_forked(use, tmp_path, alive=1)[0]
    assert f"{ending} over ranks [0, 1]: connection closed by peer: rank 1 (process" in text
    assert seconds < 30


def call_the_wrong_thing() -> str:
    x = torch.ones(4)
    if dist.get_rank() == 0:
        return error_of(lambda: dist.all_reduce(x), RuntimeError)[0]
    if dist.get_rank() == 1:
        return error_of(lambda: dist.all_reduce(x, op=dist.ReduceOp.MAX), RuntimeError)[0]
    return error_of(lambda: dist.all_reduce(x[:2]), RuntimeError)[0]


def test_ranks_that_call_different_things() -> None:
    first, second, third = run_ranks(3, call_the_wrong_thing)
    assert "all-reduce over ranks [0, 1, 2]: rank 1 called all-reduce (dtype 0, reduction 2" in first
    assert "rank 0 called all-reduce" in second and "same order" in second
    assert "rank 0 called all-reduce" in third and "16 bytes" in third


def receive_another_size() -> str:
    if dist.get_rank() == 0:
        dist.send(torch.ones(4), 1)
        return ""
    return error_of(lambda: dist.recv(torch.ones(2), 0), RuntimeError)[0]


def test_message_of_another_size() -> None:
    assert "rank 0 sent 16 bytes, but this rank expects 8" in run_ranks(2, receive_another_size)[1]


def reject() -> list[str]:
    x = torch.ones(4, 4)
    return [
        error_of(action, ValueError)[0]
        for action in (
            lambda: dist.all_reduce(x.t()),
            lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3)),
            lambda: dist.all_to_all_single(torch.ones(3), torch.ones(3), [1, 1], [1, 2]),
        )
    ]


def test_tensors_that_do_not_fit() -> None:
    strided, uneven, splits = run_ranks(2, reject)[0]
    assert "contiguous" in strided and "give the sizes" in uneven and "[1, 1]" in splits


# Without shared memory.


def use_everything() -> tuple[str, list[str]]:
    """The backend of correct collectives, and the kinds of the groups."""
    rank, size = dist.get_rank(), dist.get_world_size()
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])] if size == 4 else []
    for group in [dist.group.WORLD, *([pairs[rank // 2]] if pairs else [])]:
        x = torch.tensor([float(rank)])
        dist.all_reduce(x, group=group)
        assert x == sum(dist.get_process_group_ranks(group))
    others = (rank + 1) % size, (rank - 1) % size
    sent = dist.isend(torch.tensor([rank]), others[0])
    received = torch.tensor([-1])
    dist.recv(received, others[1])
    sent.wait()
    assert received == others[1]
    mine = [dist.group.WORLD, *([pairs[rank // 2]] if pairs else [])]
    return backend.describe(), ["shm" if isinstance(group, SharedMemoryGroup) else "gloo" for group in mine]


def run_forked(
    use: Callable[[], object],
    folder: Path,
    size: int = 2,
    *,
    change: Callable[[int], object] = lambda rank: None,
    requested: str = "auto",
    alive: int | None = None,
) -> list:
    """The results of ``use`` on the first ``alive`` ranks; ``change(rank)`` runs on a rank before it joins."""

    def run(pipe, rank: int) -> None:
        torch.set_num_threads(1)
        try:
            change(rank)
            join_for(60, requested, size, folder, rank)
            pipe.send(use())
        except Exception as error:
            pipe.send(f"{type(error).__name__}: {error}")
        pipe.recv()
        os._exit(0)

    ranks = []
    for rank in range(size):
        ours, theirs = mp.Pipe()
        process = mp.get_context("fork").Process(target=run, args=(theirs, rank))
        process.start()
        theirs.close()
        ranks.append((process, ours))
    found = [pipe.recv() for _, pipe in ranks[:alive]]
    for process, pipe in ranks[:alive]:
        pipe.send("all are done")
        process.join(20)
        assert process.exitcode == 0
    return found


def join_for(seconds: float, requested: str, size: int, folder: Path, rank: int) -> None:
    store = f"file://{folder}/store"
    join(requested, "cpu", init_method=store, rank=rank, world_size=size, timeout=timedelta(seconds=seconds))


def no_room(rank: int) -> None:
    """No file may be larger than 1 MiB, as with a full or tiny memory for shared files."""
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))


def no_address_space(rank: int) -> None:
    if rank == 1:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + (2 << 30), used + (2 << 30)))


def no_library(rank: int) -> None:
    if rank == 1:
        host.FOLDER = Path("/nowhere")
        host.shared_memory_library.cache_clear()


def old_library(rank: int) -> None:
    if rank == 1:
        host.INTERFACE += 1
        host.shared_memory_library.cache_clear()


OBSTACLES: dict[str, tuple[Callable[[int], object], str]] = {
    "no room": (no_room, "rank 1: no shared memory of"),
    "no address space": (no_address_space, "rank 1: the memory of rank 0"),
    "no library": (no_library, "was not built"),
    "old library": (old_library, "has interface"),
}


@pytest.mark.parametrize("obstacle", OBSTACLES)
def test_gloo_takes_over_and_says_why(obstacle: str, tmp_path: Path) -> None:
    change, reason = OBSTACLES[obstacle]
    for described, kinds in run_forked(use_everything, tmp_path, change=change):
        assert described.startswith("gloo, because rank 1") and reason in described and "\n" not in described
        assert kinds == ["gloo"]


def test_one_of_four_without_memory(tmp_path: Path) -> None:
    for rank, (described, kinds) in enumerate(run_forked(use_everything, tmp_path, 4, change=no_room)):
        assert described.startswith("gloo for groups of some ranks, because rank 1")
        assert kinds == ["gloo", "shm" if rank >= 2 else "gloo"]


def two_hosts(rank: int) -> None:
    host.host_identity = lambda: f"host {rank // 2}"


def test_groups_within_a_host_share_memory(tmp_path: Path) -> None:
    for described, kinds in run_forked(use_everything, tmp_path, 4, change=two_hosts):
        assert described == "shared memory within a host, gloo between hosts"
        assert kinds == ["gloo", "shm"]


def test_asking_for_what_is_not_there(tmp_path: Path) -> None:
    for text in run_forked(use_everything, tmp_path, change=no_library, requested="shm"):
        assert text.startswith("LayoutError: distributed_backend='shm': rank 1") and "use gloo, or auto" in text
    with pytest.raises(LayoutError, match="runs on CPU ranks only"):
        join("shm", "cuda")


# No leftovers.


def talk(size: int, folder: Path, rank: int) -> None:
    torch.set_num_threads(1)
    try:
        join_for(3, "shm", size, folder, rank)
        groups = [dist.group.WORLD, dist.new_group([0, 1]), dist.new_group([1, 2])]
        for _ in range(100_000):
            for group in groups:
                if group != dist.GroupMember.NON_GROUP_MEMBER:
                    dist.all_reduce(torch.ones(10_000), group=group)
    except (RuntimeError, LayoutError):  # also a rank that cannot map an arena announced by a killed rank
        os._exit(3)


def shared_files() -> set[str]:
    """Files of this project; other programs' files come and go."""
    return {name for name in os.listdir("/dev/shm") if "megatron" in name}


@pytest.mark.parametrize("whole", [False, True], ids=["one rank", "all ranks"])
def test_kill_at_any_moment_leaves_nothing(whole: bool, tmp_path: Path) -> None:
    """While ranks connect, create groups and communicate: memory files have no name, and survivors end on their own."""
    before, size = shared_files(), 3
    for seed in range(40 if WHOLE_MATRIX else 3):
        folder = tmp_path / str(seed)
        folder.mkdir()
        context = mp.get_context("fork")
        processes = [context.Process(target=talk, args=(size, folder, rank)) for rank in range(size)]
        for process in processes:
            process.start()
        time.sleep(random.Random(seed).uniform(0.0, 0.4))
        for process in processes if whole else processes[:1]:
            process.kill()
        for process in processes:
            process.join(250)
            assert process.exitcode in (-signal.SIGKILL, 3), f"seed {seed}: {process.exitcode}"
    assert shared_files() == before


def fill_the_ring() -> int:
    """More operations in flight than a ring has entries, and dropped handles."""
    tensors = [torch.full((3,), float(number)) for number in range(700)]
    handles = [dist.all_reduce(x, async_op=True) for x in tensors]
    del handles[10:600]
    for handle in handles:
        handle.wait()
    if dist.get_rank() == 0:
        for number in range(600):
            dist.send(torch.tensor([number]), 1)
    else:
        out = torch.zeros(1, dtype=torch.int64)
        for number in range(600):
            time.sleep(0.002 if number < 10 else 0)
            dist.recv(out, 0)
            assert out == number
    dist.barrier()
    kept = [*range(10), *range(600, 700)]
    assert [tensors[i].tolist() for i in kept] == [[2.0 * i] * 3 for i in kept]
    return len(kept)


def test_more_under_way_than_a_ring_holds() -> None:
    assert run_ranks(2, fill_the_ring) == [110, 110]
