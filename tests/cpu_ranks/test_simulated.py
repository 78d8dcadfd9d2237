"""Simulated ranks: collectives, messages, handles, state of a rank, failures and deadlocks."""

from __future__ import annotations

import gc
import multiprocessing
import os
import re
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
from torch import nn

from megatron_core.config import ParallelConfig
from megatron_core.cpu_ranks.simulated.divided import Connections, Failed, consecutive, run_divided
from megatron_core.cpu_ranks.simulated.meeting import Meeting
from megatron_core.cpu_ranks.simulated.world import WorldError
from megatron_core.features.paired_passes.interleave import hand_over, interleave
from megatron_core.parallel import configured, current
from megatron_core.parallel.collectives import all_reduce_, all_to_all_rows, start_ring_shift
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.rank_local import RankLocal
from megatron_core.planner.layout import Layout
from megatron_core.reports.meter import METER
from megatron_core.verify.ranks import RankFailure, run_ranks, run_simulated, this_world, whole_copies


def simulate(*args: object) -> list[object]:
    """As ``run_ranks``."""
    return run_simulated(*args).result


def divide(size: int, function: Callable[..., object], *args: object) -> list[object]:
    """As ``run_ranks``, divided over two processes."""
    return run_divided(consecutive(size, 2), partial(function, *args), None).results


ALL = [run_ranks, simulate, divide]


def every_collective() -> list[object]:
    """Results that differ between ranks, groups and orders of calls."""
    rank, size = dist.get_rank(), dist.get_world_size()
    some = dist.new_group([2, 0])
    found: list[object] = [rank, size, dist.is_initialized()]
    for group in (dist.group.WORLD, some) if rank in (0, 2) else (dist.group.WORLD,):
        index, members = dist.get_rank(group), dist.get_world_size(group)
        found.append(dist.get_process_group_ranks(group))
        for dtype in (torch.float64, torch.bfloat16, torch.int64):
            x = (torch.arange(members * 6) * (rank + 1)).to(dtype).view(-1, 2)
            for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.MIN):
                total = x.clone()
                dist.all_reduce(total, op=op, group=group)
                found.append(total.tolist())
            part, full = x.new_empty(3, 2), x.new_empty(len(x) * members, 2)
            late = dist.reduce_scatter_tensor(part, x, group=group, async_op=True)
            dist.all_gather_into_tensor(full, x, group=group)
            late.wait()
            found += [part.tolist(), full.tolist()]
            parts = [torch.empty_like(x) for _ in range(members)]
            dist.all_gather(parts, x, group=group)
            dist.broadcast(x, group=group, group_src=members - 1)
            found += [torch.stack(parts).tolist(), x.tolist()]
            exchanged = torch.empty_like(x)
            dist.all_to_all_single(exchanged, x, group=group)
            send = [(index + 2 * to) % 3 for to in range(members)]
            receive = [(source + 2 * index) % 3 for source in range(members)]
            rows = torch.full((sum(send), 3), rank, dtype=dtype)
            found += [exchanged.tolist(), all_to_all_rows(rows, send, receive, group).tolist()]
            arriving, handle = start_ring_shift(torch.full((2,), rank, dtype=dtype), group)
            handle.wait()
            found.append(arriving.tolist())
    dist.barrier()
    return found


def test_collectives_are_those_of_processes() -> None:
    expected = run_ranks(3, every_collective)
    for parts in (*(consecutive(3, processes) for processes in (1, 2, 3)), [[0, 2], [1]]):
        assert run_divided(parts, every_collective, None).results == expected


def freed_after_a_sum() -> int:
    """Bytes of a tensor that is summed and freed, as ZeRO does."""
    x = torch.ones(4)
    dist.all_reduce(x)
    x.untyped_storage().resize_(0)
    return x.untyped_storage().nbytes()


def test_tensors_of_a_collective_can_be_freed() -> None:
    for run in ALL:
        assert run(2, freed_after_a_sum) == [0, 0]


def test_processes_hold_whole_copies_of_the_model() -> None:
    layout = Layout(tp=2, dp=4, pp=2)
    assert whole_copies(layout, 2) == [[0, 1, 2, 3, 8, 9, 10, 11], [4, 5, 6, 7, 12, 13, 14, 15]]
    assert whole_copies(replace(layout, ep=4, etp=1), 2) == whole_copies(layout, 2)  # experts within each part
    assert whole_copies(replace(layout, ep=8, etp=1), 2) is None  # experts over all copies
    assert whole_copies(replace(layout, dp=1), 2) is None


def messages() -> list[float]:
    """Messages to all ranks before any receive, in two tags; received in another order."""
    rank, size = dist.get_rank(), dist.get_world_size()
    for to in range(size):
        if to != rank:
            for number in range(3):
                x = torch.tensor([100.0 * rank + 10 * to + number])
                dist.isend(x, to, tag=number % 2).wait()
                x.zero_()  # the sender may reuse a buffer after the wait
    found = []
    for source in reversed(range(size)):
        if source != rank:
            for tag in (1, 0, 0):
                buffer = torch.zeros(1)
                handle = dist.irecv(buffer, source, tag=tag)
                handle.wait()
                assert handle.is_completed()
                found.append(buffer.item())
    return found


@pytest.mark.parametrize("run", ALL)
def test_messages_of_a_tag_arrive_in_order(run) -> None:
    result = run(3, messages)
    assert result[1] == [100.0 * source + 10 + number for source in (2, 0) for number in (1, 0, 2)]


def early_read() -> tuple[float, float]:
    x = torch.ones(1)
    handle = dist.all_reduce(x, async_op=True)
    dist.barrier()
    before = x.item()
    handle.wait()
    return before, x.item()


def test_results_arrive_in_wait() -> None:
    """A read before ``wait`` is a defect, and must not work by chance."""
    assert run_simulated(3, early_read).result == [(1.0, 3.0)] * 3


def left_in_memory() -> tuple[bool, int]:
    """Whether the buffer of a receive, and how many collectives, are kept without a garbage collection."""
    gc.collect()
    gc.disable()
    buffer, kept = torch.ones(4), None
    if dist.get_rank() == 0:
        dist.recv(buffer, 1)
        kept = weakref.ref(buffer)
    else:
        dist.send(buffer, 0)
    del buffer
    dist.all_reduce(torch.ones(4))
    return kept is not None and kept() is not None, sum(type(each) is Meeting for each in gc.get_objects())


def test_handles_keep_no_memory() -> None:
    buffers, collectives = zip(*run_simulated(2, left_in_memory).result, strict=True)
    assert not any(buffers)
    assert min(collectives) == 0, "on the rank that ends last"


ORDER: list[int] = []


def one_copy_after_another() -> list[int]:
    """The order in which the ranks of two groups compute."""
    rank = dist.get_rank()
    pair = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    for _ in range(3):
        dist.all_reduce(torch.ones(1), group=pair)
        ORDER.append(rank // 2)
    dist.barrier()
    return ORDER


def test_copies_of_a_model_compute_one_after_another() -> None:
    """Only one of them then has activations."""
    order = run_simulated(4, one_copy_after_another).result[0]
    assert order == [order[0]] * 6 + [order[-1]] * 6


def in_stages() -> list[int]:
    """The order in which the two stages of a pipeline compute three micro-batches."""
    rank = dist.get_rank()
    dist.barrier()
    for number in range(3):
        if rank == 0:
            dist.isend(torch.full((1,), float(number)), 1).wait()
        else:
            dist.irecv(torch.empty(1), 0).wait()
        STAGES.append(rank)
    dist.barrier()
    return STAGES


STAGES: list[int] = []


def test_a_receiver_computes_before_its_sender_continues() -> None:
    """Stages of other processes then have messages early."""
    assert run_simulated(2, in_stages).result[0] == [1, 0, 1, 0, 1, 0]


COUNTER: RankLocal[list[int]] = RankLocal(list)


def own_state() -> tuple[object, ...]:
    """Values of this rank, of a thread that belongs to it, and of its backward."""
    rank = dist.get_rank()
    groups = configured.make_groups(ParallelConfig(tensor_model_parallel_size=2), this_world())
    METER.start(groups, torch.device("cpu"))
    COUNTER().append(rank)
    dist.barrier()
    seen: list[int] = []

    def inner(number: int) -> int:
        COUNTER().append(number)
        total = torch.tensor([float(number)])
        handle = all_reduce_(total, groups.group(WORLD), async_op=True)
        hand_over()
        handle.wait()
        seen.append(current.current().index("tp"))
        return int(total.item())

    with ThreadPoolExecutor(1) as pool:
        sums = interleave(pool, torch.device("cpu"), lambda: inner(10), lambda: inner(20))
    x = torch.ones(1, requires_grad=True)
    y = x * 2
    y.register_hook(lambda _: seen.append(current.current().rank))
    y.backward()
    unrelated: list[int] = []
    thread = threading.Thread(target=lambda: unrelated.extend(COUNTER()))
    thread.start()
    thread.join()
    calls = METER.take().traffic
    return rank, COUNTER(), seen, sums, unrelated, groups.coordinates["dp"], sum(each.calls for each in calls.values())


def test_state_belongs_to_a_rank() -> None:
    result = run_simulated(4, own_state).result
    for rank, (own, counter, seen, sums, unrelated, dp, calls) in enumerate(result):
        assert (own, counter, seen) == (rank, [rank, 20, 10], [rank % 2, rank % 2, rank])
        assert (sums, unrelated, dp, calls) == ((40, 80), [], rank // 2, 2)


class Layer(nn.Module):
    """A layer that fails, waits forever, or calls another collective on one rank."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        group = current.current().group("tp")
        if current.current().rank == 5:
            if self.kind == "raise":
                raise ValueError("a bad day")
            if self.kind == "leave out":
                return x
            if self.kind == "another":
                dist.all_gather_into_tensor(x.new_empty(2 * len(x)), x, group=group)
            if self.kind == "message":
                dist.recv(x, 1)
        dist.all_reduce(x, group=group)
        return x


def faulty(kind: str) -> None:
    configured.make_groups(ParallelConfig(tensor_model_parallel_size=2, pipeline_model_parallel_size=2), this_world())
    model = nn.Sequential(nn.Identity(), nn.ModuleDict({"mlp": Layer(kind)})["mlp"])
    model(torch.ones(3))
    dist.barrier()


@pytest.mark.parametrize("processes", [1, 3])
@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("raise", r"rank 5 \[pp1 dp0 tp1\] failed, module 1 \(Layer\), .*in forward: ValueError: a bad day"),
        (
            "leave out",
            r"deadlock: 8 ranks wait for each other; rank 4 \[pp1 dp0 tp0\] waits in all-reduce \(3 x float32, sum\), "
            r"call 1 over ranks 4, 5, for rank 5, module 1 \(Layer\), .* and rank 5 \[pp1 dp0 tp1\] waits in barrier",
        ),
        (
            "another",
            r"LayoutError: call 1 over ranks 4, 5 is all-.*\(3 x float32.*on rank [45] and all-.* on rank [45]",
        ),
        ("message", r"deadlock: 8 ranks wait.*; rank 1 .*waits in barrier.*for rank"),
    ],
)
def test_one_message_names_rank_module_and_collective(kind: str, message: str, processes: int) -> None:
    with pytest.raises(WorldError) as caught:
        run_divided(consecutive(8, processes), partial(faulty, kind), None)
    last = str(caught.value).splitlines()[-1]
    assert re.search(message, last), str(caught.value)


def leave(rank: int) -> None:
    if dist.get_rank() != rank:
        dist.barrier()


@pytest.mark.parametrize("processes", [1, 2])
@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_ends_early_is_a_deadlock(rank: int, processes: int) -> None:
    """Also if it is the only rank of its process."""
    with pytest.raises(
        WorldError, match=r"deadlock: 2 ranks wait for each other, and 1 have ended; rank 0 waits in bar"
    ):
        run_divided(consecutive(3, processes), partial(leave, rank), None)


def exit_at_once() -> None:
    if dist.get_rank() == 1:
        os._exit(3)
    dist.barrier()


def test_the_end_of_a_process_is_reported() -> None:
    with pytest.raises(WorldError, match="a process of the simulated world ended without a result"):
        run_divided(consecutive(2, 2), exit_at_once, None)


def run_forever() -> None:
    while dist.get_rank() == 1:
        pass


def test_endless_computation_is_ended() -> None:
    with pytest.raises(RankFailure, match="of 2 ranks did not finish within timeout=1 s; give a longer one"):
        run_simulated(2, run_forever, timeout=1)


def test_threads_of_a_process_report_in_turn() -> None:
    """An item of several MB passes the pipe in parts, and those of two threads must not mix."""
    parent, own = multiprocessing.Pipe()
    connections = Connections(0, [range(2)], {}, own)
    texts = [letter * 3_000_000 for letter in "abcd"]
    threads = [threading.Thread(target=connections.report_failure, args=(text,), daemon=True) for text in texts]
    for thread in threads:
        thread.start()
    arrived = []
    while len(arrived) < len(texts) and parent.poll(10.0):
        arrived.append(parent.recv())
    assert sorted(arrived) == [Failed(text) for text in texts]
