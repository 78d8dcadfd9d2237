"""torch.distributed's own functions, and DistributedDataParallel, over the backend ``shm``."""

from __future__ import annotations

import gc
import weakref

import numpy as np
import torch
import torch.distributed as dist
from torch import nn

from megatron_core.cpu_ranks.shared_memory.backend import describe
from megatron_core.cpu_ranks.shared_memory.group import SharedMemoryGroup
from megatron_core.verify.ranks import run_ranks

RANKS = 3


def call_everything() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    own = torch.tensor([rank, rank + 0.5])
    everyone = [torch.tensor([r, r + 0.5]) for r in range(size)]
    listed = [torch.zeros(2) for _ in range(size)]
    dist.all_gather(listed, own)
    assert torch.equal(torch.stack(listed), torch.stack(everyone))
    out = torch.zeros(2)
    dist.reduce_scatter(out, [own + i for i in range(size)])
    assert torch.equal(out, sum(each + rank for each in everyone))
    listed = [torch.zeros(1, 1 + rank) for _ in range(size)]  # rank i gets tensors of i + 1 elements
    dist.all_to_all(listed, [torch.full((1, 1 + to), 10.0 * rank + to) for to in range(size)])
    assert [each.tolist() for each in listed] == [[[10.0 * r + rank] * (1 + rank)] for r in range(size)]
    objects: list = [None] * size
    dist.all_gather_object(objects, {"rank": rank})
    assert objects == [{"rank": r} for r in range(size)]
    mixed = [{"from": rank}]
    dist.broadcast_object_list(mixed, 2)
    assert mixed == [{"from": 2}]
    flags = torch.zeros(size, dtype=torch.bool)
    dist.all_gather_into_tensor(flags, torch.tensor([rank == 1]))
    assert flags.tolist() == [r == 1 for r in range(size)]
    received = torch.zeros(2)
    pair = [dist.P2POp(dist.isend, own, (rank + 1) % size), dist.P2POp(dist.irecv, received, (rank - 1) % size)]
    for work in dist.batch_isend_irecv(pair):
        work.wait()
    assert torch.equal(received, everyone[rank - 1])
    dist.barrier()


def drop_what_was_received() -> list[bool]:
    """Whether tensors and messages are still in memory after their last use."""
    gc.disable()  # memory freed only by the garbage collector counts as in use
    left = []
    for _ in range(2):
        sent, received = torch.ones(100), torch.zeros(100)
        peer = 1 - dist.get_rank()
        pair = [dist.P2POp(dist.isend, sent, peer), dist.P2POp(dist.irecv, received, peer)]
        for work in dist.batch_isend_irecv(pair):
            work.wait()
        left += [weakref.ref(sent), weakref.ref(received)]
        del sent, received, pair, work
    return [tensor() is not None for tensor in left]


def test_messages_leave_memory_with_their_last_use() -> None:
    for kept in run_ranks(2, drop_what_was_received):
        assert kept == [False] * 4


def call_what_goes_through_gloo() -> None:
    rank, size = dist.get_rank(), dist.get_world_size()
    x = torch.tensor([rank + 1])
    dist.all_reduce(x, op=dist.ReduceOp.PRODUCT)
    assert x == 6
    z = torch.tensor([complex(rank, 1)])
    dist.all_reduce(z)
    assert z == complex(3, 3)
    part = torch.zeros(2, dtype=torch.complex64)
    dist.reduce_scatter_single(part, torch.full((2 * size,), complex(rank, 1)))
    assert part.tolist() == [complex(3, 3)] * 2
    x = torch.tensor([rank])
    dist.reduce(x, 1)
    assert rank != 1 or x == 3
    parts = [torch.zeros(1, dtype=torch.int64) for _ in range(size)] if rank == 2 else None
    dist.gather(torch.tensor([rank]), parts, dst=2)
    assert parts is None or [int(part) for part in parts] == [0, 1, 2]
    out = torch.zeros(1)
    dist.scatter(out, [torch.tensor([10.0 * r]) for r in range(size)] if rank == 0 else None)
    assert out == 10 * rank


def test_everything_that_torch_offers() -> None:
    run_ranks(RANKS, call_everything)
    run_ranks(RANKS, call_what_goes_through_gloo)


def receive_from_anyone() -> str:
    try:
        dist.recv(torch.zeros(1))
    except NotImplementedError as error:
        return str(error)
    return ""


def test_a_receive_names_its_source() -> None:
    assert "give src" in run_ranks(2, receive_from_anyone)[0]


def train_with_ddp(steps: int) -> tuple[str, np.ndarray]:
    torch.manual_seed(dist.get_rank())  # DDP broadcasts the first rank's weights
    plain = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4)).double()
    model = nn.parallel.DistributedDataParallel(plain, bucket_cap_mb=0.001)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    size, rank = dist.get_world_size(), dist.get_rank()
    for step in range(steps):
        batch = torch.randn(12, 8, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        model(batch.tensor_split(size)[rank]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return describe(), torch.cat([p.detach().reshape(-1) for p in plain.parameters()]).numpy()


def test_distributed_data_parallel() -> None:
    alone = run_ranks(1, train_with_ddp, 3)[0][1]
    for carrier, weights in run_ranks(RANKS, train_with_ddp, 3):
        assert carrier == "shared memory"
        np.testing.assert_allclose(weights, alone, rtol=1e-12)


def begin_again() -> list[int]:
    """Two consecutive worlds in the same processes, and a group that outlives the first."""
    rank, size = dist.get_rank(), dist.get_world_size()
    first = dist.group.WORLD
    store = dist.distributed_c10d._get_default_store()
    totals = []
    for world in range(2):
        x = torch.tensor([1 + rank])
        dist.all_reduce(x)
        totals.append(int(x))
        dist.barrier()
        dist.destroy_process_group()
        dist.init_process_group("shm", store=dist.PrefixStore(str(world), store), rank=rank, world_size=size)
    assert isinstance(first, SharedMemoryGroup)
    return totals


def test_a_second_world() -> None:
    assert run_ranks(2, begin_again) == [[3, 3]] * 2
