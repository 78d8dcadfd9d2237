"""The calls of a collective by all ranks of a group, and the messages between two of them.

The last rank that calls a collective computes its results, in rank order, so that every rank has the same bits. A rank
gets its result in ``wait``: a tensor that is read before is outdated, as it may be in a job.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.cpu_ranks.simulated.scheduler import TurnScheduler, Waiting
from megatron_core.errors import LayoutError


class Signature(NamedTuple):
    """The properties of a call that all ranks must share."""

    operation: str
    dtype: torch.dtype | None = None
    numel: int = 0
    """Elements of the tensor, of an all-to-all those of one row."""
    detail: str = ""
    """Reduction or root."""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return self.operation + (
            f" ({self.numel} x {dtype}{', ' * bool(self.detail)}{self.detail})" if self.dtype else ""
        )


class Part(NamedTuple):
    """One rank's call."""

    values: Tensor | None = None
    send: Sequence[int] = ()
    """Of an all-to-all: rows for each rank."""
    receive: Sequence[int] = ()


class Meeting:
    """One collective of a group: complete when all ranks have called it."""

    __slots__ = ("left", "number", "parts", "results", "root", "signature", "waiting")

    def __init__(self, number: int, signature: Signature, size: int, root: int) -> None:
        self.number = number
        self.signature = signature
        self.root = root
        self.parts: list[Part | None] = [None] * size
        self.left = size
        """Number of ranks that have not called it."""
        self.results: list[Tensor | None] | None = None
        self.waiting: list[Waiting] = []

    def missing(self) -> list[int]:
        """Group ranks that have not called it."""
        return [rank for rank, contribution in enumerate(self.parts) if contribution is None]

    def complete(self) -> None:
        """Compute the result of every rank."""
        contributions = [c for c in self.parts if c is not None]
        size = len(contributions)
        values = [c.values for c in contributions if c.values is not None]
        operation = self.signature.operation
        if operation == "all-reduce":
            self.results = [_reduced(values, self.signature.detail)] * size
        elif operation == "reduce-scatter":
            if self.signature.numel % size:
                raise LayoutError(
                    f"a {self.signature} over {size} ranks needs a multiple of {size} elements; pad the tensor"
                )
            self.results = list(_reduced(values, self.signature.detail).view(size, -1))
        elif operation == "all-gather":
            self.results = [torch.cat([value.view(-1) for value in values])] * size
        elif operation == "broadcast":
            self.results = [values[self.root].clone()] * size
        elif operation == "all-to-all":
            self.results = _exchanged(contributions)
        else:
            self.results = [None] * size
        self.parts = []


def _reduced(values: Sequence[Tensor], reduction: str) -> Tensor:
    """Sum, maximum or minimum in rank order; half precision is summed in float32."""
    dtype = values[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = values[0].view(-1).to(wide, copy=True)
    for value in values[1:]:
        if reduction == "sum":
            total.add_(value.view(-1))
        else:
            torch.maximum(total, value.view(-1), out=total) if reduction == "max" else torch.minimum(
                total, value.view(-1), out=total
            )
    return total.to(dtype)


def _exchanged(contributions: Sequence[Part]) -> list[Tensor | None]:
    """The rows for each rank, in the order of the senders."""
    sent = np.array([c.send for c in contributions])  # [sender, receiver]
    received = np.array([c.receive for c in contributions]).T
    for sender, receiver in np.argwhere(sent != received)[:1]:
        raise LayoutError(
            f"in an all-to-all of {len(contributions)} ranks the group's rank {sender} sends {sent[sender, receiver]} "
            f"rows to rank {receiver}, which expects {received[sender, receiver]}; give the same number"
        )
    # One selection of rows for all ranks: 64 x 64 parts of a few rows each would take milliseconds.
    counts = sent.T.flatten()
    ends = sent.cumsum().reshape(sent.shape).T.flatten()
    order = np.repeat(ends - counts.cumsum(), counts) + np.arange(counts.sum())
    rows = torch.cat([c.values for c in contributions if c.values is not None]).index_select(0, torch.from_numpy(order))
    return list(rows.split(sent.sum(0).tolist()))


@dataclass(eq=False)
class WaitingReceive:
    """A receive that waits for its message."""

    buffer: Tensor
    message: Tensor | None = None
    waiting: Waiting | None = None


ChannelKey = tuple[tuple[int, ...], int]
"""The global ranks of a group, and the number of the group among those with the same ranks."""


class Elsewhere(Protocol):
    """Other processes with ranks of the same world."""

    def homes(self, ranks: Sequence[int]) -> Sequence[int]:
        """The other processes that have some of ``ranks``."""

    def repeat(self, homes: Sequence[int], call: "RankCall") -> None:
        """Repeat a call in the processes ``homes``."""

    def send(self, message: "RankMessage") -> bool:
        """Send a message if its receiver is a rank of another process."""


class RankCall(NamedTuple):
    """A rank's call of a collective."""

    channel: ChannelKey
    caller: int
    """The rank's index in the group."""
    number: int
    """Number of this call among those of the rank."""
    signature: Signature
    share: Part
    root: int = 0


class RankMessage(NamedTuple):
    """A message between two ranks."""

    channel: ChannelKey
    key: tuple[int, int, int]
    """The sender's and the receiver's index in the group, and the tag."""
    values: Tensor


class Channel:
    """The collectives and messages of a group, shared by its ranks; ``ranks`` are global."""

    def __init__(self, key: ChannelKey, scheduler: TurnScheduler, elsewhere: Elsewhere) -> None:
        self.key = key
        self.ranks = key[0]
        self.scheduler = scheduler
        self._elsewhere = elsewhere
        self._homes = elsewhere.homes(self.ranks)
        self._meetings: dict[int, Meeting] = {}
        self._messages: dict[tuple[int, int, int], deque[Tensor]] = {}
        self._receives: dict[tuple[int, int, int], deque[WaitingReceive]] = {}

    def call(self, call: RankCall) -> Meeting:
        """A rank of this process makes a call."""
        if self._homes:
            self._elsewhere.repeat(self._homes, call)
        return self.join(call)

    def join(self, call: RankCall) -> Meeting:
        """Add a rank's call to those of the others; LayoutError if another rank's is a different one."""
        meeting = self._meetings.get(call.number)
        if meeting is None:
            meeting = Meeting(call.number, call.signature, len(self.ranks), call.root)
            self._meetings[call.number] = meeting
        elif meeting.signature != call.signature:
            first = next(rank for rank, contribution in enumerate(meeting.parts) if contribution is not None)
            raise LayoutError(
                f"call {call.number} over ranks {in_short(self.ranks)} is {call.signature} on rank "
                f"{self.ranks[call.caller]} and {meeting.signature} on rank {self.ranks[first]}; all ranks of a group "
                "must make the same calls in the same order"
            )
        meeting.parts[call.caller] = call.share
        meeting.left -= 1
        if meeting.left == 0:
            del self._meetings[call.number]
            meeting.complete()
            for sleeper in meeting.waiting:
                self.scheduler.resume(sleeper)
            meeting.waiting = []  # they refer to the meeting, and would keep its results until a garbage collection
        return meeting

    def send(self, key: tuple[int, int, int], values: Tensor) -> None:
        """Send ``values``, which must not change any more; ``key``: sender, receiver and tag."""
        message = RankMessage(self.key, key, values)
        if not self._elsewhere.send(message) and self.deliver(message):
            self.scheduler.give_way()

    def deliver(self, message: RankMessage) -> bool:
        """Give a message to its receiver; return whether this resumed a thread."""
        wanted = self._receives.get(message.key)
        if not wanted:
            self._messages.setdefault(message.key, deque()).append(message.values)
            return False
        receive = wanted.popleft()
        receive.message = message.values
        if receive.waiting is not None:
            self.scheduler.resume(receive.waiting)
        return receive.waiting is not None

    def receive(self, key: tuple[int, int, int], buffer: Tensor) -> WaitingReceive:
        """Receive the next message of ``key`` in the order of sending."""
        receive = WaitingReceive(buffer)
        arrived = self._messages.get(key)
        if arrived:
            receive.message = arrived.popleft()
        else:
            self._receives.setdefault(key, deque()).append(receive)
        return receive


def in_short(ranks: Sequence[int]) -> str:
    """Ranks as text, such as ``0-7``, ``3, 19, 35``, or ``0, 8, ..., 1016 (128 ranks)``."""
    if len(ranks) > 2 and list(ranks) == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    if len(ranks) > 8:
        return f"{ranks[0]}, {ranks[1]}, ..., {ranks[-1]} ({len(ranks)} ranks)"
    return ", ".join(map(str, ranks))


REDUCTIONS: dict[Any, str] = {dist.ReduceOp.SUM: "sum", dist.ReduceOp.MIN: "min", dist.ReduceOp.MAX: "max"}
