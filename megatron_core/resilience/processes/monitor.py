"""The thread of a training process that detects failures of other ranks and interrupts the process's waits.

It has the interface of ``Watchdog``, which it replaces: that ends the process, this lets it continue.
"""

import ctypes
import sys
import threading
import time
from contextlib import suppress

import torch.distributed as dist

from megatron_core.cpu_ranks import interrupt
from megatron_core.errors import visible
from megatron_core.parallel.flight_recorder import RECORDER
from megatron_core.parallel.time_limit import SLACK
from megatron_core.resilience.processes.memory import BEATS, ITERATION, HostMemory
from megatron_core.resilience.processes.rendezvous import Failure, Rendezvous

POLL = 0.05
"""Seconds between questions to the store."""
ENDS = 5
"""Questions to the store of which one is whether the job has ended."""
GRACE = 0.5
"""Seconds after which the exception is raised in a thread that is not waiting, between two bytecode instructions."""
LOST = "the job's store has ended"


class Monitor:
    """Interrupts the main thread when the current generation fails; ``limit``: time limit of collectives in seconds."""

    def __init__(self, rendezvous: Rendezvous, memory: HostMemory, limit: float) -> None:
        self._rendezvous = rendezvous
        self._memory = memory
        self._limit = limit
        self._numbers = memory.numbers
        self._beat = 0.0
        self.prefix = ""
        self._lock = threading.Lock()
        self._generation: int | None = None
        """The generation to watch; None between two generations."""
        self._since = 0.0
        """When the failure of the generation was noticed."""
        self._main = threading.main_thread().ident or 0
        threading.Thread(target=self._watch, name="recovery", daemon=True).start()

    def beat(self, iteration: int) -> None:
        """Report the start of a step; from the first step on, a rank without progress is reported."""
        self._numbers[ITERATION] = iteration
        self._beat = time.monotonic()

    def rest(self) -> None:
        """Stop checking for progress, because the remaining work may be slow."""
        self._beat = 0.0

    def leave(self, reason: str) -> None:
        """End the job because this rank cannot continue; with ``reason`` "" it is complete."""
        if reason:
            self._rendezvous.clone().end(1, f"rank {self._rendezvous.rank} has ended: {reason.splitlines()[0][:200]}")

    def report(self, reason: str, error: BaseException | None = None) -> str:
        """End the job, and print the ``reason``; returns it."""
        self.leave(reason)
        print(f"{self.prefix} error: {visible(reason)}".lstrip(), file=sys.stderr, flush=True)
        return reason

    def watch(self, generation: int) -> None:
        """Watch ``generation`` from now on."""
        interrupt.withdraw()
        with self._lock:
            self._generation = generation
            self._since = 0.0

    def pause(self) -> None:
        """Stop watching: the main thread has been interrupted, or is complete."""
        while True:
            try:
                with self._lock:
                    self._generation = None
                    self._beat = 0.0
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(self._main), None)
                return
            except interrupt.InterruptedWait:
                continue

    def _watch(self) -> None:
        while True:
            time.sleep(POLL)
            self._numbers[BEATS] += 1
            generation = self._generation
            if generation is None:
                continue
            try:
                self._report_hang(generation)
                failure = self._rendezvous.failure(generation)
                # An end is less urgent.
                ended = self._rendezvous.ended() if self._numbers[BEATS] % ENDS == 0 else None
                if ended is not None and ended.status == 0:
                    continue  # all ranks are complete
                reason = "" if failure is None else failure.what
                reason = reason if ended is None else ended.reason
            except (RuntimeError, OSError):
                reason = LOST
            if reason:
                self._interrupt(generation, reason)

    def _report_hang(self, generation: int) -> None:
        idle = time.monotonic() - max(self._beat, RECORDER.last)
        if self._beat and idle > SLACK * self._limit:
            what = f"rank {self._rendezvous.rank} has made no progress for {idle:.0f} s"
            self._rendezvous.fail(generation, Failure(self._rendezvous.rank, what, self._numbers[ITERATION]))

    def _interrupt(self, generation: int, reason: str) -> None:
        """Let waits fail at once, and the thread itself after ``GRACE`` seconds."""
        now = time.monotonic()
        is_first = self._since == 0.0
        with self._lock:
            if self._generation != generation:
                return
            self._since = self._since or now
            interrupt.request(reason)
            if now - self._since > GRACE:
                thread = ctypes.c_ulong(self._main)
                exception = ctypes.py_object(interrupt.InterruptedWait)
                ctypes.pythonapi.PyThreadState_SetAsyncExc(thread, exception)
        if is_first:
            # In another thread: an abort of NCCL may hang, and this one must still interrupt the main thread.
            threading.Thread(target=abort_groups, name="abort", daemon=True).start()


def abort_groups() -> None:
    """Let the collectives of all groups fail that are in flight on this rank.

    NCCL and gloo have ``abort``; the shared-memory groups end their waits by ``interrupt.request``.
    """
    for group in list(dist.distributed_c10d._world.pg_map):
        with suppress(RuntimeError):  # a group that is being created or destroyed
            group.abort()
