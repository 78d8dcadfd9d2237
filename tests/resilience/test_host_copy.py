"""Copies of a rank's state in memory that a later process of the rank reads."""

from __future__ import annotations

import os

import pytest
import torch

from megatron_core.checkpoint import Box, TensorBox
from megatron_core.errors import CheckpointError
from megatron_core.resilience.processes.memory import Copy, HostMemory
from megatron_core.resilience.state_copies import CopyWriter, HostCopy, LocalCopy
from tests.memory import needs_proc

pytestmark = needs_proc
ROOM = 1 << 16


def pieces(value: float) -> list[TensorBox]:
    """Two pieces of different dtypes and shapes, one of them not contiguous."""
    weight = torch.full((3, 5), value, dtype=torch.float64)[:, 1:4]
    step = torch.full((7,), value).to(torch.bfloat16)
    return [
        TensorBox("model.weight", (6, 3), Box((3, 0), (6, 3)), weight, owned=True),
        TensorBox("optimizer.exp_avg.weight", (7,), Box((0,), (7,)), step, owned=False),
    ]


def filled(copy: HostCopy) -> list[torch.Tensor]:
    """The stored values of all pieces."""
    targets = pieces(-1.0)
    copy.fill(targets)
    return [piece.memory for piece in targets]


def iterations(memory: HostMemory) -> list[int]:
    """The iterations of the complete copies."""
    return [copy.iteration for copy in memory.copies()]


def chosen(memory: HostMemory, iteration: int) -> HostCopy:
    """The copy of ``iteration``, from which training continues."""
    memory.choose(Copy(0, iteration, 0))
    return HostCopy([LocalCopy(memory, Copy(0, iteration, 0))])


def test_another_process_reads_the_two_newest_copies() -> None:
    memory = HostMemory(ROOM)
    pid = os.fork()
    if pid == 0:
        writer = CopyWriter(memory)
        for step in range(4):
            writer.write(step, pieces(float(step)), {"iteration": step})
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0
    assert iterations(memory) == [2, 3]
    copy = chosen(memory, 2)
    assert copy.state == {"iteration": 2}
    assert all(torch.equal(value, torch.full_like(value, 2.0)) for value in filled(copy))
    assert iterations(memory) == [2], "the state of a later step is of another course of the training"


def test_a_copy_that_was_not_completed_leaves_the_other_intact() -> None:
    memory = HostMemory(ROOM)
    pid = os.fork()
    if pid == 0:
        writer = CopyWriter(memory)
        for step in range(2):
            writer.write(step, pieces(float(step)), {"iteration": step})
        memory.before_commit = lambda: os._exit(0)
        writer.write(2, pieces(2.0), {"iteration": 2})
    assert os.waitpid(pid, 0)[1] == 0
    assert iterations(memory) == [1]
    assert all(torch.equal(value, torch.full_like(value, 1.0)) for value in filled(chosen(memory, 1)))


def test_the_chosen_copy_is_not_the_next_one_to_be_replaced() -> None:
    memory = HostMemory(ROOM)
    writer = CopyWriter(memory)
    for step in range(4):
        writer.write(step, pieces(float(step)), {"iteration": step})
    chosen(memory, 2)
    memory.begin()
    assert iterations(memory) == [2]
    memory.forget()
    assert iterations(memory) == []


def test_copies_after_a_rollback_are_newer() -> None:
    memory = HostMemory(ROOM)
    writer = CopyWriter(memory)
    for step in (4, 5):
        writer.write(step, pieces(float(step)), {"iteration": step})
    for step in (2, 3, 4):  # after the checkpoint of iteration 2
        writer.write(step, pieces(10.0 + step), {"iteration": step}, rollbacks=1)
        assert memory.copies()[-1] == Copy(0, step, 0, rollbacks=1)
    assert memory.copies() == [Copy(0, 3, 0, rollbacks=1), Copy(0, 4, 0, rollbacks=1)]
    memory.choose(Copy(0, 4, 0, rollbacks=1))
    values = filled(HostCopy([LocalCopy(memory, Copy(0, 4, 0, rollbacks=1))]))
    assert all(torch.equal(value, torch.full_like(value, 14.0)) for value in values)


def test_what_is_not_there_is_an_error() -> None:
    memory = HostMemory(ROOM)
    CopyWriter(memory).write(1, pieces(1.0)[:1], {"iteration": 1})
    with pytest.raises(KeyError):
        chosen(memory, 0)
    copy = chosen(memory, 1)
    assert copy.has("model.weight") and not copy.has("optimizer.exp_avg.weight")
    with pytest.raises(CheckpointError, match=r"iteration 1 has 0 of 7 elements of optimizer\.exp_avg\.weight"):
        copy.fill(pieces(0.0))
    with pytest.raises(CheckpointError, match="do not fit into the host memory"):
        CopyWriter(HostMemory(64)).write(1, pieces(1.0), {"iteration": 1})


def test_injected_faults_are_remembered() -> None:
    memory = HostMemory(ROOM)
    assert not memory.was_injected(3)
    memory.mark_injected(3)
    assert memory.was_injected(3) and not memory.was_injected(2)
