"""Each process of the launcher becomes the supervisor of a training process, and restarts it if it dies.

The supervisor forks the training process before torch starts threads. It never trains and uses no collectives, so it
notices a death at once (``waitpid``), and a process that is stopped or does not reach the rendezvous after a failure is
killed. Errors of one training process therefore do not end the launcher's process, and torchrun does not end the job.
"""

import os
import select
import signal
import sys
import time
from collections.abc import Callable, Sequence
from itertools import takewhile
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from megatron_core.errors import visible
from megatron_core.launcher import read_integer
from megatron_core.parallel.texts import listed
from megatron_core.resilience.processes.keeper import end_with_parent, own_address, start_keeper
from megatron_core.resilience.processes.memory import BEATS, FINISHED, GENERATION, INVITED, ITERATION, WAITS, HostMemory
from megatron_core.resilience.processes.rendezvous import End, Failure, Rendezvous

CHECK = 0.2
"""Seconds between checks of the training process and questions to the store; a death is noticed at once."""
POLL = 0.02
"""Seconds between questions whether the other supervisors have left."""
STOPPED = 1.0
"""Seconds after which a process stopped by SIGSTOP counts as hanging."""
SILENT = 60.0
"""Seconds without a beat of the training process's thread, which the interpreter's lock may delay."""
ARRIVAL = 4.0
"""Seconds that a training process has to interrupt its step after a failure; its state is in ``HostMemory``."""
ARRIVAL_WITHOUT_SPARE = 60.0
"""The same if no process would take its place."""
BEAT = 0.5
"""Seconds between the beats of a supervisor."""
LOST = 15.0
"""Seconds without a beat after which a supervisor counts as lost."""
WATCHED = 8
"""Number of the next ranks that each supervisor watches; all of a host if it has more."""
ENDING = 20.0
"""Seconds that a training process has to exit after the end of the job."""
LEAVING = 10.0
"""Seconds that the supervisor with the store waits for the others."""
LIMIT = 5
"""Number of deaths at one iteration after which the job ends."""
FORWARDED = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


class Supervisor:
    """Starts and watches the training processes of one rank."""

    def __init__(
        self,
        rendezvous: Rendezvous,
        memory: HostMemory,
        mirror: HostMemory,
        *,
        restart_status: int,
        respawns: bool = True,
    ) -> None:
        """``mirror``: copies of another rank. ``restart_status``: exit status if a restart of the job may help.
        ``respawns``: start a new process after a death; otherwise the job continues without this rank.

        Errors: ``LayoutError`` if other hosts could not reach this one."""
        self._rendezvous = rendezvous
        self._memory = memory
        self._restart = restart_status
        self._mirror = mirror
        self._respawns = respawns
        self._address = own_address(rendezvous.size)
        self._pid = self._keeper = 0
        self._reason = ""
        """The reason for which the supervisor has killed the process."""
        self._deaths: list[int] = []
        self._signals: list[int] = []
        self._stopped_since = self._late_since = 0.0
        self._suspended = 0.0
        self._beats = (0, 0.0)
        self._next_beat = 0.0
        self._watched = dict[int, tuple[int, float]]()
        """The ranks whose supervisors this one watches, their beats, and when these last changed."""

    def start(self) -> int:
        """Return in a new training process, and again in each one that takes its place; the supervisor exits here.

        Returns the number of processes of the rank before this one.
        """
        handled = [number for number in FORWARDED if signal.getsignal(number) is not signal.SIG_IGN]
        previous = {number: signal.signal(number, self._forward) for number in handled}
        number = 0
        while True:
            sys.stdout.flush()
            sys.stderr.flush()
            self._keep()
            parent = os.getpid()
            numbers = self._memory.numbers
            numbers[FINISHED] = 0
            self._pid = os.fork()
            if self._pid == 0:
                self._begin(parent, previous)
                return number
            self._stopped_since = self._late_since = 0.0
            self._beats = (numbers[BEATS], self._now())
            self._after(self._wait())
            number += 1

    def _keep(self) -> None:
        """Start the keeper if there is none."""
        if not self._keeper or os.waitpid(self._keeper, os.WNOHANG)[0]:
            self._keeper = start_keeper(self._rendezvous, self._memory, self._mirror, self._address)

    def _begin(self, parent: int, previous: dict[signal.Signals, Any]) -> None:
        """In the training process: restore the signal handlers, and end with the supervisor."""
        for number, handler in previous.items():
            signal.signal(number, handler)
        end_with_parent()
        if os.getppid() != parent:
            os._exit(self._restart)
        for received in self._signals:
            os.kill(os.getpid(), received)

    def _forward(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)
        if self._pid:
            try:
                os.kill(self._pid, number)
            except ProcessLookupError:
                return

    def _wait(self) -> int:
        """Wait until the training process ends, or kill it; returns its status as ``waitpid`` does."""
        self._reason = ""
        process = os.pidfd_open(self._pid)
        try:
            while True:
                pid, status = os.waitpid(self._pid, os.WNOHANG)
                if pid:
                    self._pid = 0
                    return status
                reason = self._reason or self._hang(self._now())
                if reason and not self._reason:
                    self._reason = reason
                    os.kill(self._pid, signal.SIGKILL)
                asleep = time.monotonic()
                select.select([process], [], [], CHECK)  # returns when the process ends
                if (asleep := time.monotonic() - asleep) > STOPPED:
                    self._suspended += asleep
        finally:
            os.close(process)

    def _now(self) -> float:
        """Seconds, without the time in which this process was stopped, as all processes of the job after Ctrl-Z."""
        return time.monotonic() - self._suspended

    def _hang(self, now: float) -> str:
        """Why the training process must be killed, or ""."""
        if _is_stopped(self._pid):
            self._stopped_since = self._stopped_since or now
            if now - self._stopped_since > STOPPED:
                return f"was stopped for {STOPPED:.0f} s and killed"
        else:
            self._stopped_since = 0.0
        beats = self._memory.numbers[BEATS]
        if beats != self._beats[0]:
            self._beats = beats, now
        elif now - self._beats[1] > SILENT:
            return f"did not respond for {SILENT:.0f} s and was killed"
        if now > self._next_beat:
            self._next_beat = now + BEAT
            self._keep()
            self._ask(self._watch_others, None)
        return self._is_late(now)

    def _watch_others(self) -> None:
        """Report the loss of the next ranks' supervisors, for example with their host.

        All ranks of a host are lost together. The rank before the first of them reports them.
        """
        if self._memory.numbers[GENERATION] == WAITS:
            return  # a beat would be one of the lost process
        self._rendezvous.beat()
        if self._memory.numbers[GENERATION] == INVITED:
            return  # the others have not met this rank, so that it has no generation that could fail
        count = max(WATCHED, read_integer("LOCAL_WORLD_SIZE", 1, least=1))
        now = self._now()
        known = self._watched
        self._watched = {}
        for rank, beats in self._rendezvous.watched(count).items():
            same = rank in known and known[rank][0] == beats
            self._watched[rank] = known[rank] if same else (beats, now)
        lost = list(takewhile(lambda rank: now - self._watched[rank][1] > LOST, self._watched))
        if lost:
            self._lose(lost)

    def _lose(self, ranks: Sequence[int]) -> None:
        """Continue without ``ranks``, or end the job if it must have a process for every rank."""
        who = "supervisors of ranks" if len(ranks) > 1 else "supervisor of rank"
        have = "have" if len(ranks) > 1 else "has"
        what = f"the {who} {listed(ranks)} {have} not answered for {LOST:.0f} s: a host may be lost"
        if self._respawns:
            self._say(f"error: {what}; restart the job, or start it with --recover-without-spare")
            return self._rendezvous.end(self._restart, what)
        generation = self._rendezvous.next_generation(self._memory.numbers[GENERATION])
        for rank in ranks:
            self._rendezvous.lose(rank)
            self._rendezvous.leave(rank)
        self._rendezvous.fail(generation, Failure(ranks[0], what, self._memory.numbers[ITERATION]))

    def _is_late(self, now: float) -> str:
        """Whether the process misses the rendezvous after a failure, or the end of the job; the reason or ""."""
        numbers = self._memory.numbers
        ended = self._ask(self._rendezvous.ended, None)
        failed = self._ask(lambda: self._rendezvous.failure(numbers[GENERATION]), None)
        if failed is None and ended is None:
            self._late_since = 0.0
            return ""
        self._late_since = self._late_since or now
        limit = ARRIVAL if self._respawns else ARRIVAL_WITHOUT_SPARE
        limit = limit if ended is None else ENDING
        if now - self._late_since > limit:
            what = "end" if ended is not None else "interrupt its step"
            return f"did not {what} within {limit:.0f} s and was killed"
        return ""

    def _after(self, status: int) -> None:
        """Report the death of the training process, or exit if the job is over for this rank."""
        numbers = self._memory.numbers
        code = os.waitstatus_to_exitcode(status)
        ended = self._ask(self._rendezvous.ended, None)
        if numbers[FINISHED] or code == 0:
            self._exit(max(code, 0))
        if ended is not None:
            self._exit(code if code > 0 else ended.status)
        # If this generation has failed before, the process has not reached the rendezvous of the next one.
        generation = numbers[GENERATION]
        answers = self._ask(self._rendezvous.all_left, None) is not None
        how = self._reason or (f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with status {code}")
        what = f"rank {self._rendezvous.rank} {how}"
        if self._reason:
            self._say(f"note: {what}")
        self._deaths.append(numbers[ITERATION])
        repeated = self._deaths.count(numbers[ITERATION]) > LIMIT
        if repeated or not answers:
            end = f"{LIMIT + 1} times in one iteration" if answers else "the job's store does not answer"
            self._say(f"error: {what}; {end}: the job ends")
            self._ask(lambda: self._rendezvous.end(self._restart, f"{what}; {end}"), None)
            self._exit(self._restart)
        if not self._respawns:
            copies = self._memory.copies() + self._mirror.copies()
            self._ask(lambda: self._rendezvous.lose(self._rendezvous.rank, copies), None)
        failure = Failure(self._rendezvous.rank, what, numbers[ITERATION])
        self._ask(lambda: self._rendezvous.die(generation, failure), None)
        if not self._respawns:
            self._await_end()

    def _await_end(self) -> NoReturn:
        """Keep the launcher's process, and the store if it is here, until the others have completed the job."""
        while True:
            if self._ask(lambda: all(map(self._rendezvous.is_lost, range(self._rendezvous.size))), True):
                self._ask(lambda: self._rendezvous.end(self._restart, "all ranks are lost"), None)
            ended = self._ask(self._rendezvous.ended, End(self._restart, ""))
            if ended is not None:
                self._exit(ended.status)
            self._keep()
            self._ask(self._rendezvous.beat, None)
            time.sleep(BEAT)

    def _exit(self, status: int) -> NoReturn:
        """Exit; the supervisor that has the store waits for the others first."""
        self._ask(self._rendezvous.leave, None)
        deadline = time.monotonic() + LEAVING
        while (
            self._rendezvous.rank == 0
            and time.monotonic() < deadline
            and not self._ask(self._rendezvous.all_left, True)
        ):
            time.sleep(POLL)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)

    def _ask(self, question: Callable[[], Any], otherwise: Any) -> Any:
        """The answer of the store, or ``otherwise`` if it is gone."""
        try:
            return question()
        except (RuntimeError, OSError):
            return otherwise

    @staticmethod
    def _say(text: str) -> None:
        print(visible(text), file=sys.stderr, flush=True)


def _is_stopped(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"
    except OSError:
        return False


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
