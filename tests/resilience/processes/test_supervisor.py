"""The watch of supervisors over one another, with a store in this process."""

from __future__ import annotations

import os
import signal
import subprocess
from types import SimpleNamespace

import pytest
import torch.distributed as dist

from megatron_core.resilience.processes import supervisor
from megatron_core.resilience.processes.memory import GENERATION, INVITED, WAITS, HostMemory
from megatron_core.resilience.processes.rendezvous import Rendezvous
from megatron_core.resilience.processes.supervisor import Supervisor
from tests.memory import needs_proc

pytestmark = needs_proc
SIZE = 6


class Clock:
    """Seconds that pass only when a test says so."""

    def __init__(self) -> None:
        self.now = 100.0

    def monotonic(self) -> float:
        """The time."""
        return self.now

    def time(self) -> float:
        """The time."""
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """The clock of the supervisors."""
    clock = Clock()
    monkeypatch.setattr(supervisor, "time", clock)
    return clock


def supervisors(*, respawns: bool = False) -> tuple[list[Rendezvous], list[Supervisor]]:
    """The views and the supervisors of all ranks."""
    store = dist.HashStore()
    rendezvous_of_ranks = [Rendezvous(store, rank, SIZE) for rank in range(SIZE)]
    memories = [HostMemory(1 << 12, rank=rank) for rank in range(SIZE)]
    made = [
        Supervisor(rendezvous, memory, memory, restart_status=75, respawns=respawns)
        for rendezvous, memory in zip(rendezvous_of_ranks, memories, strict=True)
    ]
    return rendezvous_of_ranks, made


def test_the_ranks_of_a_host_are_lost_in_one_failure(clock: Clock) -> None:
    rendezvous_of_ranks, made = supervisors()
    alive = (0, 1, 5)
    for _ in range(2 * int(supervisor.LOST) + 2):
        for rank in alive:
            made[rank]._watch_others()
        clock.now += 0.5
    assert [rank for rank in range(SIZE) if rendezvous_of_ranks[0].is_lost(rank)] == [2, 3, 4]
    failure = rendezvous_of_ranks[0].failure(0)
    assert failure is not None and failure.what.startswith(
        "the supervisors of ranks 2, 3, 4 have not answered for 15 s"
    )
    assert rendezvous_of_ranks[0].failure(1) is None and rendezvous_of_ranks[0].absent(1) == [0, 1, 5]


def test_the_supervisor_of_a_rank_that_joins_beats_only_once_it_is_expected(clock: Clock) -> None:
    rendezvous_of_ranks, made = supervisors()
    for generation, beats in ((WAITS, 0), (INVITED, 1), (3, 2)):
        made[1]._memory.numbers[GENERATION] = generation
        made[1]._watch_others()
        assert rendezvous_of_ranks[0].watched() == {1: beats}
    assert set(made[1]._watched) == {0, 2, 3, 4, 5}


def test_without_replacement_a_lost_host_ends_the_job(clock: Clock, capsys: pytest.CaptureFixture[str]) -> None:
    rendezvous_of_ranks, made = supervisors(respawns=True)
    for _ in range(2 * int(supervisor.LOST) + 2):
        made[1]._watch_others()
        clock.now += 0.5
    end = rendezvous_of_ranks[0].ended()
    assert end is not None and end.status == 75 and "--recover-without-spare" in capsys.readouterr().err


def test_the_time_in_which_all_processes_were_stopped_does_not_count(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    rendezvous_of_ranks, made = supervisors()
    process = subprocess.Popen(["sleep", "60"])
    left = iter(range(4))

    def select(*_: object) -> None:
        clock.now += 2 * supervisor.SILENT
        if next(left, None) is None:
            os.kill(process.pid, signal.SIGKILL)  # Popen.kill would read the exit status

    monkeypatch.setattr(supervisor, "select", SimpleNamespace(select=select))
    monkeypatch.setattr(made[1], "_keep", lambda: None)
    made[1]._pid = process.pid
    made[1]._beats = made[1]._memory.numbers[supervisor.BEATS], clock.now
    assert os.waitstatus_to_exitcode(made[1]._wait()) == -signal.SIGKILL
    assert made[1]._reason == "" and rendezvous_of_ranks[0].failure(0) is None
    process.wait()
