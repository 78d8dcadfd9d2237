"""Requests of the threads of a server in order, executed on all ranks; their results until they are retrieved."""

import json
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field

from megatron_core.errors import DataError, MegatronError
from megatron_core.inference.service import HEARTBEAT, RankService
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.texts import gather_from_all_ranks
from megatron_core.post_training.tinker_server.operations import Operations
from megatron_core.post_training.tinker_server.sampling import Json

HELD_SECONDS = 120.0
"""Time limit for the arrival of the requests before a request of the same training."""
KEPT_BYTES = 2**28
KEPT_RESULTS = 20_000
"""Bytes and number of results that are kept; clients may retrieve a result again if the answer was lost."""
Answer = tuple[str, bytes]
"""Content type and body of a result."""
Finish = Callable[[Json], Answer]
"""The answer to a request, from the result of its operation."""


class BusyError(MegatronError):
    """Too many requests are waiting."""


class GoneError(MegatronError):
    """A result is no longer kept, or was never here."""


@dataclass(eq=False)
class _Entry:
    """A request: its operation, and its answer in the future."""

    number: str
    operation: Json
    finish: Finish
    future: Future[Answer] = field(default_factory=Future)
    since: float = field(default_factory=time.monotonic)


@dataclass
class _Sequence:
    """The numbered requests of a training: which one is next, and those that arrived before their turn."""

    next_number: int = 1
    early: dict[int, _Entry] = field(default_factory=dict)
    skipped: set[int] = field(default_factory=set)
    numbers: dict[int, str] = field(default_factory=dict)
    """The requests by their numbers: a client that has lost an answer sends its request again."""


class OperationService(RankService):
    """Executes requests one after another, and samples with the same weights at the same time.

    Samples advance between the other operations, and new ones join them. Those with other weights wait until the
    present ones have ended, and no more join these in the meantime.

    On rank 0, ``submit`` and ``entry`` may be called from any thread. The other ranks only call ``run``.
    """

    def __init__(self, operations: Operations, *, most_waiting: int) -> None:
        run = operations.trainer.run
        self._operations = operations
        self._device = run.world.device
        super().__init__("training", run.groups.group(WORLD), self._device, ahead=1)
        self._most_waiting = most_waiting
        self._queue: deque[_Entry] = deque()
        self._entries: dict[str, _Entry] = {}
        self._finished: deque[tuple[str, int]] = deque()
        self._kept_bytes = 0
        self._sequences: dict[str, _Sequence] = {}
        self._once: dict[str, str] = {}
        self._sampled: dict[str, _Entry] = {}
        """The requests for samples that are under way."""

    # Requests, on rank 0.

    def submit(self, operation: Json, finish: Finish, *, sequence: str = "", number: int | None = None) -> str:
        """Queue an operation; returns the number of the request.

        ``number``: its place among the requests of ``sequence``, from 1 on. A request with the place of an earlier one
        is the same request. ``BusyError`` if too many requests wait.
        """
        with self._changed:
            if self._stopped or len(self._queue) >= self._most_waiting:
                reason = "the server is stopping" if self._stopped else f"{len(self._queue)} requests are waiting"
                raise BusyError(f"{reason}; try again later")
            places = self._sequences.setdefault(sequence, _Sequence()) if number else _Sequence()
            if number in places.numbers:
                return places.numbers[number]
            entry = _Entry(uuid.uuid4().hex, operation, finish)
            self._entries[entry.number] = entry
            if not number:
                self._queue.append(entry)
            else:
                places.numbers[number] = entry.number
                places.early[number] = entry
                self._release(places)
            self._changed.notify()
        return entry.number

    def submit_once(self, key: str, operation: Json, finish: Finish) -> str:
        """As ``submit`` without an order; a request with the ``key`` of an earlier one is the same request."""
        with self._changed:
            if key not in self._once:
                number = self.submit(operation, finish)
                if not key:
                    return number
                self._once[key] = number
            return self._once[key]

    def known(self, sequence: str, number: int | None) -> str | None:
        """The request at a place of a sequence, if it has arrived before."""
        with self._changed:
            places = self._sequences.get(sequence)
            return None if places is None or not number else places.numbers.get(number)

    def skip(self, sequence: str, number: int | None) -> None:
        """Go on after a request that was refused: its client sends the next one."""
        if number:
            with self._changed:
                places = self._sequences.setdefault(sequence, _Sequence())
                places.skipped.add(number)
                self._release(places)
                self._changed.notify()

    def _release(self, places: _Sequence) -> None:
        """Queue the requests of a sequence whose turn it is."""
        while places.next_number in places.early or places.next_number in places.skipped:
            entry = places.early.pop(places.next_number, None)
            if entry is not None:
                self._queue.append(entry)
            places.next_number += 1

    def forget(self, sequence: str) -> None:
        """Forget the places of a training that has ended."""
        with self._changed:
            self._sequences.pop(sequence, None)

    def future(self, number: str) -> Future[Answer]:
        """The answer to a request. ``GoneError`` if it is not kept; one that waits too long for others fails."""
        with self._changed:
            entry = self._entries.get(number)
            if entry is None:
                raise GoneError(f"request {number!r} is not known, or its result is no longer kept")
            for places in self._sequences.values():
                if entry in places.early.values() and time.monotonic() - entry.since > HELD_SECONDS:
                    missing = places.next_number
                    entry.future.set_exception(DataError(f"the request with seq_id {missing} has not arrived"))
                    places.early = {number: other for number, other in places.early.items() if other is not entry}
            return entry.future

    def cancel(self, number: str) -> None:
        """Drop a request for samples."""
        with self._changed:
            entry = self._entries.get(number)
            if entry is None or entry.future.done() or entry.operation.get("kind") != "sample":
                return
            entry.future.set_exception(DataError("the request was cancelled"))
            if entry in self._queue:
                self._queue.remove(entry)
            else:
                operation = {"kind": "cancel", "number": number}
                self._queue.appendleft(_Entry(uuid.uuid4().hex, operation, lambda result: ("", b"")))

    # Execution, on all ranks.

    def run(self) -> None:
        """Execute operations until ``stop``; every rank calls this."""
        operations = self._operations
        while True:
            entries = self._take() if self._texts.is_source else []
            # The operations for the other ranks, by number; an empty object to stop.
            has_text = bool(entries) or self._stopped
            text = json.dumps({entry.number: entry.operation for entry in entries}) if has_text else ""
            text = self._texts.exchange(text)
            if text:
                requests = json.loads(text)
                if not requests:
                    return
                self._execute(requests, entries)
            if operations.sampler.busy:
                for number, result in operations.sampler.advance_requests().items():
                    if number in self._sampled:
                        self._complete(self._sampled.pop(number), result)

    def _take(self) -> list[_Entry]:
        """Wait for operations: requests for samples that can join those under way, or another operation."""
        sampler = self._operations.sampler
        with self._changed:
            if not self._queue and not self._stopped and not sampler.busy:
                self._changed.wait(HEARTBEAT)
            if self._stopped or not self._queue:
                return []
            samples = [entry for entry in self._queue if entry.operation["kind"] == "sample"]
            for entry in self._queue:
                if entry.operation["kind"] != "sample":
                    self._queue.remove(entry)
                    return [entry]
            weights = samples[0].operation["weights"]
            if sampler.busy and not all(sampler.has_weights(entry.operation["weights"]) for entry in samples):
                return []
            joining = {entry: None for entry in samples if entry.operation["weights"] == weights}
            self._queue = deque(entry for entry in self._queue if entry not in joining)
            return list(joining)

    def _execute(self, operations: dict[str, Json], entries: list[_Entry]) -> None:
        """Execute an operation, or start samples; all ranks agree on an error."""
        result: Json = {}
        first = next(iter(operations.values()))
        samples = first["kind"] == "sample"
        error = ""
        try:
            if samples:
                self._operations.start_samples(first["weights"], operations)
            else:
                result = self._operations.run(first)
        except MegatronError as fault:
            error = str(fault)
            result = {"error": error}
        # A fault of one rank alone leaves the others with another state: then the server must stop.
        errors = gather_from_all_ranks("fault" if error else "", self._device)
        if len(set(errors)) > 1:
            raise MegatronError(f"an operation failed on some ranks only: {error or 'see the other ranks'}")
        if samples and not error:
            self._sampled.update({entry.number: entry for entry in entries})
            return
        if first["kind"] == "cancel" and first["number"] in self._sampled:
            self._complete(self._sampled.pop(first["number"]), result)
        for entry in entries:
            self._complete(entry, result)

    def _complete(self, entry: _Entry, result: Json) -> None:
        """Store the answer to a request, and forget the oldest ones if they have too many bytes."""
        size = 0
        if entry.future.done():
            pass
        elif "error" in result:
            entry.future.set_exception(DataError(result["error"]))
        else:
            answer = entry.finish(result)
            size = len(answer[1])
            entry.future.set_result(answer)
        entry.operation = {}
        if entry.number not in self._entries:
            return
        with self._changed:
            self._finished.append((entry.number, size))
            self._kept_bytes += size
            while len(self._finished) > 1 and (self._kept_bytes > KEPT_BYTES or len(self._finished) > KEPT_RESULTS):
                number, former = self._finished.popleft()
                self._kept_bytes -= former
                del self._entries[number]

    def _fail_waiting(self) -> None:
        with self._changed:
            for entry in self._entries.values():
                if not entry.future.done():
                    entry.future.set_exception(RuntimeError("the server has stopped"))
