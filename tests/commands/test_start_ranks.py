"""The process that starts ranks on this machine: failures to start them, and signals."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest

from megatron_core.commands import start_ranks
from megatron_core.commands.start_ranks import LocalRanks


def test_a_rank_that_cannot_be_started_ends_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    first = subprocess.Popen(["sleep", "60"])
    forked = iter([first.pid])

    def fork() -> int:
        for pid in forked:
            return pid
        raise BlockingIOError(11, "Resource temporarily unavailable")

    monkeypatch.setattr(start_ranks.os, "fork", fork)
    with pytest.raises(SystemExit, match=r"rank 1 of 3 cannot be started \(Resource .*\); start fewer ranks, or"):
        LocalRanks().fork(3, 1)
    assert first.wait(10) == -signal.SIGKILL


def test_streams_may_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert not LocalRanks().fork(0, 1)


def test_signals_to_ranks_that_have_ended_are_ignored() -> None:
    ended = subprocess.Popen(["true"])
    ended.wait()
    ranks = LocalRanks()
    ranks.running[ended.pid] = 0
    ranks.send(signal.SIGTERM)
    ranks.kill()


def test_status_of_a_signal_without_a_name(capsys: pytest.CaptureFixture[str]) -> None:
    ranks = LocalRanks()
    ranks.failed = 1, -(signal.SIGRTMIN + 1)
    assert start_ranks._status(ranks) == 128 + signal.SIGRTMIN + 1
    assert f"rank 1 was killed by signal {signal.SIGRTMIN + 1}" in capsys.readouterr().err


def _state(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def _wait_for(pid: int, states: str) -> None:
    limit = time.monotonic() + 10
    while _state(pid) not in states:
        assert time.monotonic() < limit, f"{pid} is {_state(pid)}, not one of {states}"
        time.sleep(0.01)


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_ctrl_z_stops_all_processes_of_a_rank_until_the_shell_continues_this_one() -> None:
    rank = subprocess.Popen(["sh", "-c", "sleep 60 & echo $!; wait"], stdout=subprocess.PIPE, start_new_session=True)
    assert rank.stdout is not None
    processes = rank.pid, int(rank.stdout.readline())
    starter = os.fork()
    if starter == 0:
        ranks = LocalRanks()
        ranks.running[rank.pid] = 0
        ranks.suspend()
        os._exit(5)
    try:
        assert os.WIFSTOPPED(os.waitpid(starter, os.WUNTRACED)[1])
        for pid in processes:
            _wait_for(pid, "T")
        os.kill(starter, signal.SIGCONT)
        assert os.waitstatus_to_exitcode(os.waitpid(starter, 0)[1]) == 5
        for pid in processes:
            _wait_for(pid, "SR")
    finally:
        os.killpg(rank.pid, signal.SIGKILL)
        rank.wait()
        rank.stdout.close()
