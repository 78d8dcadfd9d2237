"""Copies that other processes give and mirror."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_core.checkpoint import Box, TensorBox
from megatron_core.checkpoint.host_copy import CopyWriter, HostCopy, LocalCopy
from megatron_core.errors import CheckpointError
from megatron_core.parallel.recovery.keeper import Connection, RemoteCopy, start_keeper
from megatron_core.parallel.recovery.meeting import Meeting
from megatron_core.parallel.recovery.memory import MIRRORED, MIRRORS, Copy, HostMemory
from tests.memory import needs_proc

pytestmark = needs_proc
ROOM, SIZE = 1 << 16, 3
WHOLE = torch.arange(24, dtype=torch.float64).view(6, 4)


def piece(rows: tuple[int, int], values: torch.Tensor) -> TensorBox:
    """Rows of a tensor ``[6, 4]``."""
    return TensorBox("model.weight", (6, 4), Box((rows[0], 0), (rows[1], 4)), values, owned=True)


@pytest.fixture
def ranks() -> Iterator[list[tuple[Meeting, HostMemory]]]:
    """Three ranks with keepers, each with two rows of the tensor as its copy of iteration 5."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    made, keepers = [], list[int]()
    for rank in range(SIZE):
        memory, mirror = HostMemory(ROOM, rank=rank), HostMemory(ROOM, rank=rank)
        memory.numbers[MIRRORS] = 1 + (rank + 1) % SIZE
        meeting = Meeting(store, rank, SIZE)
        keepers.append(start_keeper(meeting, memory, mirror))
        made.append((meeting, memory, mirror))
        rows = (2 * rank, 2 * rank + 2)
        CopyWriter(memory).write(5, [piece(rows, WHOLE[slice(*rows)].clone())], {"iteration": 5, "rank": rank})
    try:
        yield made
    finally:
        for pid in keepers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def connect(meeting: Meeting, rank: int) -> Connection:
    """A connection to a keeper, which may have to start."""
    deadline = time.monotonic() + 20
    while (address := meeting.keeper(rank)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return Connection(address)


def test_a_part_of_another_layout_is_read_from_several_ranks(ranks: list) -> None:
    meeting, memory, _ = ranks[1]
    remote = [RemoteCopy(connect(meeting, rank), Copy(rank, 5, 0)) for rank in (2, 0)]
    copy = HostCopy([LocalCopy(memory, Copy(1, 5, 0)), *remote])
    assert copy.state == {"iteration": 5, "rank": 1}
    found = torch.zeros(4, 4, dtype=torch.float64)
    copy.fill([piece((1, 5), found)])
    assert torch.equal(found, WHOLE[1:5])
    with pytest.raises(CheckpointError, match=r"2 of 4 elements|8 of 16 elements"):
        HostCopy([LocalCopy(memory, Copy(1, 5, 0))]).fill([piece((1, 5), found)])


def test_a_keeper_reads_every_copy_of_another_rank(ranks: list) -> None:
    meeting, memory, _ = ranks[0]
    mirror = ranks[2][2]  # of rank 0
    writer = CopyWriter(memory)
    for iteration in (6, 7):
        deadline = time.monotonic() + 20
        while memory.numbers[MIRRORED] != memory.copies()[-1].stamp:
            assert time.monotonic() < deadline
            time.sleep(0.001)
        writer.write(iteration, [piece((0, 2), WHOLE[:2] * iteration)], {"iteration": iteration})
    while memory.numbers[MIRRORED] != Copy(0, 7, 0).stamp:
        assert time.monotonic() < deadline + 20
        time.sleep(0.001)
    assert mirror.copies() == [Copy(0, 6, 0), Copy(0, 7, 0)]
    found = torch.zeros(2, 4, dtype=torch.float64)
    remote = RemoteCopy(connect(meeting, 2), Copy(0, 6, 0))
    HostCopy([remote]).fill([piece((0, 2), found)])
    assert torch.equal(found, WHOLE[:2] * 6)


def test_a_keeper_answers_only_who_knows_its_word_and_what_it_has(ranks: list) -> None:
    meeting = ranks[0][0]
    connection = connect(meeting, 1)
    with pytest.raises(KeyError):
        connection.ask("open", Copy(1, 4, 0))
    host, port, _ = meeting.keeper(1) or ("", 0, "")
    with pytest.raises(ConnectionResetError):
        Connection((host, port, "another word")).ask("open", Copy(1, 5, 0))
