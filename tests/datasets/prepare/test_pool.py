"""When the workers are stopped they are gone, and what they held is free."""

import contextlib
import os
import time
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from megatron_core.datasets.prepare import journal
from megatron_core.datasets.prepare.journal import WorkFolder
from megatron_core.datasets.prepare.pool import Pool
from megatron_core.errors import DataError


def slow_to_end(connections: list[Connection], parent: int) -> None:
    """Two processes; the second takes a while to be gone when there is nothing left to do."""
    second = os.fork() == 0
    mine, other = connections if not second else reversed(connections)
    other.close()
    mine.send("ready")
    with contextlib.suppress(EOFError):
        mine.recv()
    if second:
        time.sleep(0.3)
    os._exit(0)


@pytest.mark.parametrize("dismissed", [False, True])
def test_stop_returns_when_the_last_worker_is_gone(
    dismissed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(journal, "LOCK_SECONDS", 0.0)
    work = WorkFolder(str(tmp_path / "out"))
    pool = Pool(2, slow_to_end, ())
    assert pool.receive(1) == "ready"
    pool.dismiss() if dismissed else pool.send(1, "end")
    pool.stop()
    work.close()
    # The second one would still hold the lock, which it was forked with.
    WorkFolder(str(tmp_path / "out")).close()


def test_the_lock_of_a_run_that_is_just_ending_is_waited_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    work = WorkFolder(str(tmp_path / "out"))
    waits: list[float] = []

    def wait(seconds: float) -> None:
        waits.append(seconds)
        if len(waits) == 3:
            work.close()

    monkeypatch.setattr(time, "sleep", wait)
    WorkFolder(str(tmp_path / "out")).close()
    assert len(waits) == 3
    monkeypatch.setattr(journal, "LOCK_SECONDS", 0.0)
    other = WorkFolder(str(tmp_path / "out"))
    with pytest.raises(DataError, match="is in use by another process"):
        WorkFolder(str(tmp_path / "out"))
    other.close()
