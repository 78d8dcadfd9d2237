"""A simulated world whose ranks are divided over processes, so that it uses several cores.

Each process runs the threads of some ranks. A call of a collective is repeated in all other processes that have ranks
of the group, and each of them computes the result, in rank order; a message goes to the process of its receiver. If
processes hold whole copies of the model, only what copies exchange passes between them. If they hold consecutive ranks,
which in the usual order are consecutive pipeline stages, messages between two stages and sums over all ranks do.

The parent of the processes finds deadlocks: no process can continue if each waits, and if it has received everything
that the others have sent to it.
"""

import multiprocessing as mp
import os
import resource
import threading
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import torch
from torch import Tensor

from megatron_core.cpu_ranks.simulated import report
from megatron_core.cpu_ranks.simulated.meeting import Part, RankCall, RankMessage
from megatron_core.cpu_ranks.simulated.world import SimulatedWorld, WorldError
from megatron_core.errors import MegatronError

PATIENCE = 0.02
"""Seconds without work after which a process reports that it waits."""


_NOTHING: Any = None


class _Packed(NamedTuple):
    """A tensor in a form that another process can read."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    content: bytes

    @classmethod
    def of(cls, x: Tensor) -> "_Packed":
        """Copy ``x``."""
        values = x.detach().flatten().clone()  # numpy() forbids to free the memory of the tensor that it is called on
        return cls(x.dtype, tuple(x.shape), values.view(torch.uint8).numpy().tobytes())

    def tensor(self) -> Tensor:
        """The tensor."""
        if not self.content:
            return torch.empty(self.shape, dtype=self.dtype)
        return torch.frombuffer(bytearray(self.content), dtype=self.dtype).view(self.shape)


class _Packet(NamedTuple):
    """A call or a message without its tensor, and the tensor."""

    item: RankCall | RankMessage
    values: _Packed | None

    @classmethod
    def of_call(cls, call: RankCall) -> "_Packet":
        """Copy a call."""
        emptied = Part(None, tuple(call.share.send), tuple(call.share.receive))
        return cls(call._replace(share=emptied), None if call.share.values is None else _Packed.of(call.share.values))

    @classmethod
    def of_message(cls, message: RankMessage) -> "_Packet":
        """Copy a message."""
        return cls(message._replace(values=_NOTHING), _Packed.of(message.values))

    def open(self) -> RankCall | RankMessage:
        """The call or the message."""
        values = None if self.values is None else self.values.tensor()
        if isinstance(self.item, RankCall):
            return self.item._replace(share=self.item.share._replace(values=values))
        assert values is not None, "a message has values"
        return self.item._replace(values=values)


class Idle(NamedTuple):
    """A process waits; numbers of items that it has sent to and received from each process."""

    sent: list[int]
    received: list[int]


class Ended(NamedTuple):
    """The ranks of a process have ended, and their results are sent."""

    sent: list[int]
    processor_seconds: float
    bytes: int


class Failed(NamedTuple):
    """A rank failed; the text is the message about it."""

    text: str


class Stopped(NamedTuple):
    """The threads of a process that wait forever, and the number of its ranks that have ended."""

    waiting: list[report.Stuck]
    ended: int


class ProcessResults(NamedTuple):
    """The results of a process's ranks; in one item, because they may share tensors."""

    of_rank: Mapping[int, Any]


DESCRIBE = "describe the threads that wait"


class Connections:
    """One process's connections to the others and to their parent."""

    def __init__(
        self, index: int, ranks_of_parts: Sequence[Sequence[int]], peers: Mapping[int, Connection], parent: Connection
    ) -> None:
        self._own = index
        self._peers = peers
        self._parent = parent
        self._part_of = {rank: number for number, ranks in enumerate(ranks_of_parts) for rank in ranks}
        self._inbox: SimpleQueue[tuple[int, Any]] = SimpleQueue()
        self._sent = [0] * len(ranks_of_parts)
        self._received = [0] * len(ranks_of_parts)
        self._world: SimulatedWorld | None = None
        self._telling = threading.Lock()
        """Held while a thread sends to the parent: a rank may wait while the main thread reports an end or a failure,
        and the parts of two items in one pipe would mix."""

    def open(self, world: SimulatedWorld) -> None:
        """Deliver to the channels of ``world`` from now on."""
        self._world = world
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        """Empty all connections, so that no process has to wait for another one before it can send."""
        part_of = {connection: process for process, connection in self._peers.items()} | {self._parent: self._own}
        while True:
            for connection in wait(list(part_of)):
                assert isinstance(connection, Connection), "these are connections"
                try:
                    self._inbox.put((part_of[connection], connection.recv()))
                except EOFError:  # the parent ended and with it this world
                    os._exit(1)

    def homes(self, ranks: Sequence[int]) -> list[int]:
        """The other processes that have some of ``ranks``."""
        return [process for process in dict.fromkeys(self._part_of[rank] for rank in ranks) if process != self._own]

    def repeat(self, homes: Sequence[int], call: RankCall) -> None:
        """Repeat a rank's call of a collective in the processes ``homes``."""
        packet = _Packet.of_call(call)
        for home in homes:
            self._post(home, packet)

    def send(self, message: RankMessage) -> bool:
        """Send a message if its receiver is a rank of another process."""
        home = self._part_of[message.channel[0][message.key[1]]]
        if home != self._own:
            self._post(home, _Packet.of_message(message))
        return home != self._own

    def _post(self, home: int, item: Any) -> None:
        self._sent[home] += 1
        self._peers[home].send(item)

    def _tell(self, item: Any) -> None:
        with self._telling:
            self._parent.send(item)

    def take(self) -> None:
        """Deliver everything that has arrived."""
        while not self._inbox.empty():
            self._deliver(*self._inbox.get())

    def wait(self) -> None:
        """Wait for the next item and deliver it."""
        try:
            received = self._inbox.get(timeout=PATIENCE)
        except Empty:
            self._tell(Idle(list(self._sent), list(self._received)))
            received = self._inbox.get()
        self._deliver(*received)

    def _deliver(self, sender: int, item: Any) -> None:
        assert self._world is not None, "open was called"
        if item == DESCRIBE:
            self._tell(Stopped(*self._world.stuck()))
            return
        self._received[sender] += 1
        content = item.open()
        channel = self._world.channel(content.channel)
        try:
            channel.deliver(content) if isinstance(content, RankMessage) else channel.join(content)
        except MegatronError as error:
            self._world.end(f"{type(error).__name__}: {error}")

    def report_end(self, results: Mapping[int, Any]) -> None:
        """Send the results of this process's ranks to the parent."""
        self._tell(ProcessResults(results))
        usage = resource.getrusage(resource.RUSAGE_SELF)
        self._tell(Ended(list(self._sent), usage.ru_utime + usage.ru_stime, usage.ru_maxrss * 1024))

    def report_failure(self, text: str) -> None:
        """Send the reason of a failure to the parent."""
        self._tell(Failed(text))


@dataclass
class Divided:
    """The results of a world by rank, and what its processes took."""

    results: list[Any]
    processor_seconds: float
    bytes: int
    """Sum of the largest memory of each process; what they share is counted in each."""


def consecutive(size: int, processes: int) -> list[range]:
    """Equal parts of consecutive ranks."""
    return [range(size * i // processes, size * (i + 1) // processes) for i in range(processes)]


def run_divided(divided: Sequence[Sequence[int]], function: Callable[[], Any], timeout: float | None) -> Divided:
    """Call ``function()`` on all ranks of a simulated world, those of each of ``divided`` in a forked process.

    Errors: ``WorldError`` as in ``SimulatedWorld.run``.
    """
    size = sum(map(len, divided))
    processes = len(divided)
    context: Any = mp.get_context("fork")
    pairs = {(a, b): context.Pipe() for b in range(processes) for a in range(b)}
    parents = [context.Pipe() for _ in divided]
    started = []
    try:
        for index in range(processes):
            peers = {b if a == index else a: ends[index == b] for (a, b), ends in pairs.items() if index in (a, b)}
            ends_ = [end for ends in (*pairs.values(), *parents) for end in ends]
            needed = [*peers.values(), parents[index][1]]
            closed = [end for end in ends_ if end not in needed]
            connections = Connections(index, divided, peers, parents[index][1])
            options = (size, divided[index], connections, closed, function, timeout)
            process = context.Process(target=_run_part, args=options)
            process.start()
            started.append(process)
        for end in (*(end for ends in pairs.values() for end in ends), *(ends[1] for ends in parents)):
            end.close()
        return _Parent(size, [ends[0] for ends in parents]).wait()
    finally:
        for process in started:
            process.kill()  # its ranks' threads may sleep forever
            process.join()
        for ends in parents:
            ends[0].close()


def _run_part(
    size: int,
    ranks: Sequence[int],
    connections: Connections,
    closed: Sequence[Connection],
    function: Callable[[], Any],
    timeout: float | None,
) -> None:
    """A process of a divided world."""
    for end in closed:
        end.close()
    try:
        connections.report_end(SimulatedWorld(size, ranks, connections).run(function, timeout))
    except MegatronError as error:
        connections.report_failure(str(error))
    except BaseException:  # the parent reports any exception
        connections.report_failure(f"in a process of the simulated world:\n{traceback.format_exc()}")
    threading.Event().wait()  # until the parent ends this process, because others may still send to it


class _Parent:
    """Collects the results of a divided world and finds deadlocks."""

    def __init__(self, size: int, connections: Sequence[Connection]) -> None:
        self._size = size
        self._connections = connections
        self._idle: dict[int, Idle] = {}
        self._ended: dict[int, Ended] = {}
        self._stopped: dict[int, Stopped] = {}
        self._results: dict[int, Any] = {}

    def wait(self) -> Divided:
        """Return when all ranks have ended."""
        part_of = {connection: process for process, connection in enumerate(self._connections)}
        while len(self._ended) < len(self._connections):
            for connection in wait(list(part_of)):
                assert isinstance(connection, Connection), "these are connections"
                try:
                    self._take(part_of[connection], connection.recv())
                except EOFError:
                    raise WorldError("a process of the simulated world ended without a result") from None
        ends = self._ended.values()
        return Divided(
            [self._results[rank] for rank in range(self._size)],
            sum(end.processor_seconds for end in ends),
            sum(end.bytes for end in ends),
        )

    def _take(self, process: int, item: Any) -> None:
        if isinstance(item, Failed):
            raise WorldError(item.text)
        if isinstance(item, ProcessResults):
            self._results.update(item.of_rank)
        elif isinstance(item, Stopped):
            self._stopped[process] = item
            if len(self._stopped) == len(self._idle):
                raise WorldError(
                    report.deadlock(
                        [text for _, stopped in sorted(self._stopped.items()) for text in stopped.waiting],
                        sum(stopped.ended for stopped in self._stopped.values()) + len(self._results),
                    )
                )
        else:
            (self._ended if isinstance(item, Ended) else self._idle)[process] = item
            if isinstance(item, Ended):
                self._idle.pop(process, None)
            if self._nothing_moves():
                for idle in self._idle:
                    self._connections[idle].send(DESCRIBE)

    def _nothing_moves(self) -> bool:
        """Whether each process has ended or waits, and has received everything that the others sent to it.

        The reports are of different times. But if all numbers agree, no item passed between them, so that no process
        can have continued after its own report.
        """
        if not self._idle or len(self._idle) + len(self._ended) < len(self._connections):
            return False
        sent = {process: state.sent for process, state in self._idle.items()}
        sent |= {process: state.sent for process, state in self._ended.items()}
        return all(
            sent[sender][receiver] == state.received[sender]
            for receiver, state in self._idle.items()
            for sender in sent
            if sender != receiver
        )
