"""Detects failed, lost and hanging ranks; all ranks report their location in the code before they end together.

A thread on every rank polls the store twice a second. The first rank that fails, or whose time limit expires, writes a
reason to the store; every rank answers with its current line of Python and its latest collectives. The first rank
prints the reason with the unresponsive ranks, and then a report of all answers. Then every rank exits, so that
torchrun restarts them. Nothing here waits indefinitely for the store, because a stopped rank may host it.
"""

import atexit
import json
import os
import sys
import threading
import time
import traceback
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

import torch.distributed as dist

from megatron_core.errors import visible
from megatron_core.parallel.flight_recorder import LIBRARIES, RECORDER
from megatron_core.parallel.time_limit import start_thread, within

POLL = 0.5
"""Seconds between polls of the store."""
EARLY = 1.0
"""Seconds until the reason is printed, with the ranks that have not answered by then; more than ``POLL``."""
ANSWERS = 3.0
"""Seconds that ranks have to answer; more than ``EARLY``."""


class Watchdog:
    """One rank's monitoring thread; a rank without progress for ``limit`` seconds is reported."""

    def __init__(self, store: dist.Store, rank: int, size: int, limit: float, status: int) -> None:
        # A separate connection, if torch supports it, because calls on a shared one may block.
        clone = getattr(store, "clone", lambda: store)
        self._store = dist.PrefixStore("watchdog", clone())
        self._rank = rank
        self._size = size
        self._limit = limit
        self._status = status
        self.prefix = ""
        self._iteration = 0
        self._beat = 0.0
        self._answered = False
        self._leaving = threading.Event()
        # The thread whose stack is reported: it calls the collectives.
        self._main = threading.main_thread().ident
        self._host = "the launcher" if "TORCHELASTIC_RUN_ID" in os.environ else "rank 0"
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        atexit.register(self._stop)

    def beat(self, iteration: int) -> None:
        """A step starts; from the first one on, a rank without progress is reported."""
        self._iteration = iteration
        self._beat = time.monotonic()

    def rest(self) -> None:
        """Stop checking for progress, because the remaining work may be slow."""
        self._beat = 0.0

    def _stop(self) -> None:
        # A thread that is in a call of torch while Python ends would abort the process.
        self._leaving.set()
        self._thread.join(EARLY)

    def leave(self, reason: str) -> None:
        """This rank ends; with a ``reason`` the other ranks end too, without waiting for it."""
        self._leaving.set()
        # Once: a rank that is already a part of a report must not start another.
        if reason and not self._answered:
            self._answered = True
            content = json.dumps({"left": reason.splitlines()[0][:200]})

            def tell() -> bool:
                self._store.set(f"answer/{self._rank}", content)
                self._store.set("reason", f"rank {self._rank} has ended: {reason.splitlines()[0][:200]}")
                return True

            # The store may be on a host that is gone.
            within(ANSWERS, tell, otherwise=False)

    def report(self, reason: str, error: BaseException | None = None) -> str:
        """On the first rank that calls it, print ``reason`` with the ranks that do not answer within ``EARLY`` seconds,
        then the location of every rank; returns both. On other ranks, wait for all answers and return "".

        ``error``: its traceback replaces the current location of this rank.
        """
        # This thread reports, so the polling thread must neither answer for this rank nor end it before it has printed.
        self._answered = True
        self._leaving.set()
        answer = self._place()
        if error is not None:
            answer["line"] = _line(traceback.extract_tb(error.__traceback__))
        answers: dict[int, dict[str, Any]] = {self._rank: answer}
        is_first: list[bool] = []  # stays empty while the store does not answer

        def ask() -> None:
            # An atomic counter decides which of several failing ranks prints the report.
            is_first.append(self._store.add("first", 1) == 1)
            self._store.set(f"answer/{self._rank}", json.dumps(answer))
            if is_first[0]:
                self._store.set("reason", reason)
            deadline = time.monotonic() + ANSWERS
            while time.monotonic() < deadline and len(answers) < self._size:
                for rank in set(range(self._size)) - answers.keys():
                    if self._store.check([f"answer/{rank}"]):
                        answers[rank] = json.loads(self._store.get(f"answer/{rank}"))
                time.sleep(0.05)

        asking = start_thread(ask)
        # The reason is printed early, because a scheduler may end the job before all answers have arrived.
        asking.join(EARLY)
        if is_first == [False]:
            asking.join(ANSWERS)
            # The launcher ends all ranks as soon as one has ended: the first rank must have printed by then.
            within(ANSWERS, self._has_printed, otherwise=False)
            return ""
        silent = sorted(set(range(self._size)) - set(answers))
        if not is_first:
            reason += f"; the job's store, hosted by {self._host}, does not answer"
        elif silent:
            reason += f"; no answer yet from rank {', '.join(map(str, silent))}"
        self._print(f"{self.prefix} error: {reason}".lstrip())
        asking.join(ANSWERS + POLL - EARLY)
        report = describe_failure(reason, dict(answers), self._size)
        self._print(report.partition("\n")[2])
        # In a thread: the store may have ended with its host.
        start_thread(lambda: self._store.set("printed", "")).join(EARLY)
        return report

    def _has_printed(self) -> bool:
        """Wait until the first rank has printed the report."""
        while not self._store.check(["printed"]):
            time.sleep(0.05)
        return True

    def _watch(self) -> None:
        while not self._leaving.wait(POLL):
            try:
                is_requested = self._store.check(["reason"])
            except (RuntimeError, OSError):
                return  # the store is gone: collectives will fail on their own
            # Another rank has failed: collectives with it would wait for the whole time limit.
            if is_requested:
                self._answer_and_exit()
            # A collective is progress, too: a long evaluation has many of them without a new step.
            idle = time.monotonic() - max(self._beat, RECORDER.last)
            if self._beat and idle > self._limit:
                self.report(f"rank {self._rank} has made no progress for {idle:.0f} s")
                os._exit(self._status)

    def _answer_and_exit(self) -> None:
        """Report this rank's location, give the main thread time to end, then exit."""
        if not self._answered:
            self._answered = True
            self._store.set(f"answer/{self._rank}", json.dumps(self._place()))
        # The main thread may be saving or printing its own error, and the first rank needs the time to read the
        # answers.
        time.sleep(ANSWERS + POLL)
        os._exit(self._status)

    @staticmethod
    def _print(text: str) -> None:
        with suppress(OSError, ValueError):  # standard error is full or closed
            print(visible(text), file=sys.stderr, flush=True)

    def _place(self) -> dict[str, Any]:
        """Current line of the main thread and its latest collectives."""
        frame = sys._current_frames().get(self._main or 0)
        line = _line(traceback.extract_stack(frame)) if frame is not None else "no Python line"
        return {"prefix": self.prefix, "iteration": self._iteration, "line": line, **recorded_calls()}


def _line(stack: Sequence[traceback.FrameSummary]) -> str:
    """The innermost line outside torch and this package."""
    frames = [f for f in stack if not f.filename.startswith((*LIBRARIES, __file__, "<"))] or list(stack)
    frame = frames[-1]
    return f"{os.path.relpath(frame.filename)}:{frame.lineno} in {frame.name}: {frame.line}"


def describe_failure(reason: str, answers: Mapping[int, Mapping[str, Any]], size: int) -> str:
    """The report: the reason, the location of each rank, the first collective that differs."""
    lines = [reason]
    ranks_of: dict[str, list[int]] = defaultdict(list)
    for rank in range(size):
        answer = answers.get(rank)
        if answer is None:
            text = "no answer: its process has ended or is stopped, or its host cannot be reached"
        elif "left" in answer:
            text = f"has ended: {answer['left']}"
        else:
            text = f"in iteration {answer['iteration']} at {answer['line']}"
        ranks_of[text].append(rank)
    for text, ranks in ranks_of.items():
        coordinates = answers.get(ranks[0], {}).get("prefix", "") if len(ranks) == 1 else ""
        lines.append(f"  rank {', '.join(map(str, ranks))}{' ' * bool(coordinates)}{coordinates}: {text}")
    alive = {rank: answer for rank, answer in answers.items() if "left" not in answer}
    difference = first_differing_call(alive)
    if difference is not None:
        lines.append(f"  the first collective that differs: {difference}")
    return "\n".join(lines)


@dataclass(frozen=True)
class Call:
    """One collective or point-to-point message."""

    channel: str
    """Identifies a group, or a sender and its receiver; all of its ranks must make the same calls in the same order."""
    ranks: tuple[int, ...]
    number: int
    """Number of the call in its channel, from 1."""
    what: str
    shape: tuple[int, ...]
    dtype: str
    seconds: float
    """Time of the call on this host's clock."""

    def __str__(self) -> str:
        """Kind, shape and dtype of the call."""
        return f"{self.what} of {list(self.shape)} {self.dtype}"

    @classmethod
    def of(cls, content: Mapping[str, Any]) -> "Call":
        """Rebuild a ``Call`` from its ``asdict`` form in JSON."""
        return cls(**{**content, "ranks": tuple(content["ranks"]), "shape": tuple(content["shape"])})


def recorded_calls() -> dict[str, Any]:
    """Counts by channel, the ranks of each channel and the latest calls of this rank, in a form that JSON can store."""
    calls = [
        asdict(Call(channel, RECORDER.ranks[channel], number, what, shape, str(dtype).removeprefix("torch."), seconds))
        for channel, number, what, shape, dtype, seconds in list(RECORDER.calls)
    ]
    return {"counts": dict(RECORDER.counts), "ranks": {k: list(v) for k, v in RECORDER.ranks.items()}, "calls": calls}


def first_differing_call(records: Mapping[int, Mapping[str, Any]]) -> str | None:
    """Describe the earliest call in which ranks differ, given the ``content`` of each rank; None if they agree."""
    channels = {name: tuple(r) for content in records.values() for name, r in content["ranks"].items()}
    differences = [_difference(name, ranks, records) for name, ranks in channels.items()]
    return min((d for d in differences if d is not None), default=(0.0, None))[1]


def _difference(
    channel: str, ranks: Sequence[int], records: Mapping[int, Mapping[str, Any]]
) -> tuple[float, str] | None:
    """Time and description of the first call in which the ranks of a channel differ; None if they agree."""
    members = {rank: records[rank] for rank in ranks if rank in records}
    calls: dict[int, dict[int, Call]] = defaultdict(dict)
    for rank, content in members.items():
        for call in (Call.of(stored) for stored in content["calls"] if stored["channel"] == channel):
            calls[call.number][rank] = call
    counts = {rank: content["counts"].get(channel, 0) for rank, content in members.items()}
    # A rank that is behind is as much a difference as another kind of call: the others wait for it.
    for number, calls_by_rank in sorted(calls.items()):
        kinds: dict[str, list[int]] = defaultdict(list)
        for rank, call in calls_by_rank.items():
            kinds[str(call)].append(rank)
        behind = [rank for rank, count in counts.items() if count < number]
        if len(kinds) == 1 and not behind:
            continue
        listing = " but ".join(f"{label} by {_named(by)}" for label, by in sorted(kinds.items()))
        missing = f", and not by {_named(behind)}, which made {min(counts[r] for r in behind)} calls" if behind else ""
        when = min(call.seconds for call in calls_by_rank.values())
        return when, f"call {number} over ranks {list(ranks)} was {listing}{missing}"
    return None


def _named(ranks: Sequence[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
