"""Workers return results in order, end immediately when they are stopped, and never outlive their parent."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from megatron_core.preprocess.pool import TASKS_EACH, WorkerDiedError, WorkerPool


def test_results_come_in_order_and_few_tasks_are_taken_ahead() -> None:
    taken, offset = [], 10

    def tasks() -> object:
        for number in range(30):
            taken.append(number)
            yield number

    def work(number: int) -> int:
        time.sleep(0.01 * (number % 3 == 0))
        return number + offset

    pool = WorkerPool(3, work)
    for count, result in enumerate(pool.map(tasks())):
        assert result == count + offset and len(taken) <= count + TASKS_EACH * 3
    assert count == 29
    pool.stop()


def test_errors_keep_their_kind() -> None:
    def work(number: int) -> None:
        raise FileNotFoundError(2, "no such file", f"{number}.txt")

    pool = WorkerPool(1, work)
    with pytest.raises(FileNotFoundError, match=r"7\.txt"):
        list(pool.map([7]))
    pool.stop()


def test_a_dead_worker_is_an_error() -> None:
    pool = WorkerPool(2, lambda number: os.kill(os.getpid(), signal.SIGKILL) if number == 5 else number)
    with pytest.raises(
        WorkerDiedError, match=r"a worker process died, perhaps because of insufficient memory; .* --workers than 2"
    ):
        list(pool.map(range(100)))
    pool.stop()


def test_stop_does_not_wait_for_the_work() -> None:
    pool = WorkerPool(2, lambda seconds: (time.sleep(seconds), os.getpid())[1])
    pid = next(pool.map([0, 600, 600, 600, 600, 600]))
    begun = time.monotonic()
    pool.stop()
    assert time.monotonic() - begun < 300 and not alive(pid)


PARENT = """
import os, time
from megatron_core.preprocess.pool import WorkerPool
def work(number):
    os.write(1, b"%d\\n" % os.getpid())  # print writes number and end of line apart
    time.sleep(600)
next(WorkerPool(2, work).map(range(6)))
"""


def test_workers_end_with_their_parent() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    parent = subprocess.Popen([sys.executable, "-c", PARENT], env=environment, stdout=subprocess.PIPE, text=True)
    workers = [int(parent.stdout.readline()) for _ in range(2)]
    assert all(map(alive, workers))
    parent.kill()
    parent.communicate()
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and any(map(alive, workers)):
        time.sleep(0.01)
    assert not any(map(alive, workers))


def alive(pid: int) -> bool:
    """Whether a process runs; a zombie does not."""
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state) and not state.startswith("Z")
