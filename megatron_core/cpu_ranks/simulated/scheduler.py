"""Turns: of all threads of a simulated world one runs at a time, until it waits for other ranks or ends.

A thousand threads that compete for the interpreter's lock would spend their time on it; here all but one sleep. In one
process the order of turns depends only on the program, so that every run is the same. If all threads wait, the last one
waits for other processes.

The thread that became ready last runs first: of several copies of a model one then runs until it needs the others, so
that few of them have activations at a time.
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import Protocol


class Waiting:
    """A thread that waits in ``operation`` for the ranks ``awaited()``; ``describe`` says for what."""

    __slots__ = ("awaited", "describe", "lock", "operation", "rank", "thread")

    def __init__(
        self, rank: int, operation: str, describe: Callable[[], str], awaited: Callable[[], list[int]] = list
    ) -> None:
        self.rank = rank
        self.operation = operation
        self.describe = describe
        self.awaited = awaited
        self.thread = threading.get_ident()
        self.lock = threading.Lock()
        self.lock.acquire()


class Arrivals(Protocol):
    """Calls and messages of ranks in other processes."""

    def take(self) -> None:
        """Deliver those that have arrived."""

    def wait(self) -> None:
        """Wait for the next one and deliver it."""


class TurnScheduler:
    """Gives turns to the threads of a process, first to the one that became ready last."""

    def __init__(self, arrivals: Arrivals) -> None:
        self._ready: deque[threading.Lock] = deque()
        self._waiting: dict[Waiting, None] = {}
        self._arrivals = arrivals

    def add(self) -> threading.Lock:
        """Queue a thread that has not started; it must acquire the returned lock before it runs."""
        lock = threading.Lock()
        lock.acquire()
        self._ready.appendleft(lock)
        return lock

    def wait(self, waiting: Waiting) -> None:
        """Give the turn to the next thread and sleep until ``resume`` and the turn of ``waiting``."""
        self._waiting[waiting] = None
        self.pass_on()
        waiting.lock.acquire()

    def resume(self, waiting: Waiting) -> None:
        """Queue a thread for its next turn."""
        del self._waiting[waiting]
        self._ready.append(waiting.lock)

    def give_way(self) -> None:
        """Let the thread that was resumed last run first, and continue afterwards."""
        lock = threading.Lock()
        lock.acquire()
        self._ready.insert(-1, lock)
        self.pass_on()
        lock.acquire()

    @property
    def waiting(self) -> list[Waiting]:
        """All threads that wait."""
        return list(self._waiting)

    def pass_on(self) -> None:
        """Give the turn to the next thread, because this one ends or waits."""
        self._arrivals.take()
        while self._waiting and not self._ready:
            self._arrivals.wait()
        if self._ready:
            self._ready.pop().release()
