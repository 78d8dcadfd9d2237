"""Copies that other processes give and mirror."""

from __future__ import annotations

import os
import signal
import socket
import time
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from megatron_core.checkpoint import Box, TensorBox
from megatron_core.errors import CheckpointError, LayoutError, MegatronError
from megatron_core.resilience import state_copies
from megatron_core.resilience.processes.keeper import LOOPBACK, Connection, RemoteCopy, own_address, start_keeper
from megatron_core.resilience.processes.memory import MIRRORED, MIRRORS, Copy, HostMemory
from megatron_core.resilience.processes.rendezvous import Rendezvous
from megatron_core.resilience.state_copies import CopyWriter, HostCopy, LocalCopy, await_mirror
from tests.memory import needs_proc

pytestmark = needs_proc
ROOM, SIZE = 1 << 16, 3
WHOLE = torch.arange(24, dtype=torch.float64).view(6, 4)


def piece(rows: tuple[int, int], values: torch.Tensor) -> TensorBox:
    """Rows of a tensor ``[6, 4]``."""
    return TensorBox("model.weight", (6, 4), Box((rows[0], 0), (rows[1], 4)), values, owned=True)


@pytest.fixture
def store() -> Iterator[dist.Store]:
    """A store held by a process of its own, as a launcher holds it.

    A store's thread looks up the address of each new connection, with a lock of the C library. A process that is forked
    from the same process meanwhile inherits the lock as held, and waits forever when it connects.
    """
    with socket.create_server((LOOPBACK, 0)) as server:
        port = server.getsockname()[1]
        if (holder := os.fork()) == 0:
            try:
                master = dist.TCPStore(LOOPBACK, port, is_master=True, master_listen_fd=server.detach())
                while master:
                    signal.pause()
            finally:
                os._exit(1)
    try:
        yield dist.TCPStore(LOOPBACK, port)
    finally:
        os.kill(holder, signal.SIGKILL)
        os.waitpid(holder, 0)


@pytest.fixture
def ranks(store: dist.Store) -> Iterator[list[tuple[Rendezvous, HostMemory]]]:
    """Three ranks with keepers, each with two rows of the tensor as its copy of iteration 5."""
    made, keepers = [], list[int]()
    for rank in range(SIZE):
        memory, mirror = HostMemory(ROOM, rank=rank), HostMemory(ROOM, rank=rank)
        memory.numbers[MIRRORS] = 1 + (rank + 1) % SIZE
        rendezvous = Rendezvous(store, rank, SIZE)
        keepers.append(start_keeper(rendezvous, memory, mirror))
        made.append((rendezvous, memory, mirror))
        rows = (2 * rank, 2 * rank + 2)
        CopyWriter(memory).write(5, [piece(rows, WHOLE[slice(*rows)].clone())], {"iteration": 5, "rank": rank})
    try:
        yield made
    finally:
        for pid in keepers:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)


def connect(rendezvous: Rendezvous, rank: int) -> Connection:
    """A connection to a keeper, which may have to start."""
    deadline = time.monotonic() + 20
    while (address := rendezvous.keeper(rank)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return Connection(address)


def test_a_part_of_another_layout_is_read_from_several_ranks(ranks: list) -> None:
    rendezvous, memory, _ = ranks[1]
    remote = [RemoteCopy(connect(rendezvous, rank), Copy(rank, 5, 0)) for rank in (2, 0)]
    copy = HostCopy([LocalCopy(memory, Copy(1, 5, 0)), *remote])
    assert copy.state == {"iteration": 5, "rank": 1}
    found = torch.zeros(4, 4, dtype=torch.float64)
    copy.fill([piece((1, 5), found)])
    assert torch.equal(found, WHOLE[1:5])
    with pytest.raises(CheckpointError, match=r"2 of 4 elements|8 of 16 elements"):
        HostCopy([LocalCopy(memory, Copy(1, 5, 0))]).fill([piece((1, 5), found)])


def test_a_keeper_reads_every_copy_of_another_rank(ranks: list) -> None:
    rendezvous, memory, _ = ranks[0]
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
    remote = RemoteCopy(connect(rendezvous, 2), Copy(0, 6, 0))
    HostCopy([remote]).fill([piece((0, 2), found)])
    assert torch.equal(found, WHOLE[:2] * 6)


def test_a_keeper_answers_only_who_knows_its_word_and_what_it_has(ranks: list) -> None:
    rendezvous = ranks[0][0]
    connection = connect(rendezvous, 1)
    with pytest.raises(KeyError):
        connection.ask("open", Copy(1, 4, 0))
    host, port, _ = rendezvous.keeper(1) or ("", 0, "")
    with pytest.raises(ConnectionResetError):
        Connection((host, port, "another word")).ask("open", Copy(1, 5, 0))


@pytest.mark.parametrize(
    "line", [b"[1]\n", b"null\n", b"no JSON\n", '{"word": "\u00e4"}\n'.encode(), b'{"word": "\\ud800"}\n']
)
def test_a_keeper_closes_connections_without_a_valid_request(line: bytes, ranks: list) -> None:
    rendezvous = ranks[0][0]
    connect(rendezvous, 1).close()
    host, port, _ = rendezvous.keeper(1) or ("", 0, "")
    with socket.create_connection((host, port), 10) as connection:
        connection.sendall(line)
        assert connection.recv(1) == b""


def test_addresses_of_this_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("MASTER_ADDR", "localhost")
    assert own_address(4) == "127.0.0.1"
    with pytest.raises(
        LayoutError, match=r"MASTER_ADDR='localhost' is (127\.0\.0\.1|::1) .* 4 of 8 ranks are here; set"
    ):
        own_address(8)
    monkeypatch.setenv("MASTER_ADDR", "::1")
    with pytest.raises(LayoutError, match="MASTER_ADDR='::1'"):
        own_address(8)
    monkeypatch.setenv("MASTER_ADDR", "no host")
    with pytest.raises(LayoutError, match="MASTER_ADDR='no host': this host has no way to it"):
        own_address(8)


def test_a_keeper_that_cannot_listen_says_why(capfd: pytest.CaptureFixture[str]) -> None:
    memory = HostMemory(ROOM, rank=5)
    pid = start_keeper(Rendezvous(dist.HashStore(), 5, 6), memory, memory, "192.0.2.1")
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 1
    assert "error: the keeper of rank 5 has ended: OSError" in capfd.readouterr().err


def test_a_mirror_that_nobody_reads_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state_copies, "LONGEST_WAIT", 0.02)
    memory = HostMemory(ROOM, rank=2)
    CopyWriter(memory).write(5, [piece((0, 2), WHOLE[:2])], {"iteration": 5})
    with pytest.raises(MegatronError, match="rank 0 has not read the copy of rank 2 within 0 s; check that its host"):
        await_mirror(memory, (0, 2, 3))
