"""The calls of a collective by all ranks of a group, and the messages between two of them.

The last rank that calls a collective computes its results, in rank order, so that every rank has the same bits. A rank
gets its result in ``wait``: a tensor that is read before is outdated, as it may be in a job.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_core.errors import LayoutError
from megatron_core.parallel.simulated.scheduler import Scheduler, Waiting


class Signature(NamedTuple):
    """The properties of a call that all ranks must share."""

    kind: str
    dtype: torch.dtype | None = None
    numel: int = 0
    """Elements of the tensor, of an all-to-all those of one row."""
    detail: str = ""
    """Reduction or root."""

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        return self.kind + (f" ({self.numel} x {dtype}{', ' * bool(self.detail)}{self.detail})" if self.dtype else "")


class Part(NamedTuple):
    """One rank's call."""

    values: Tensor | None = None
    send: Sequence[int] = ()
    """Of an all-to-all: rows for each rank."""
    receive: Sequence[int] = ()


class Meeting:
    """One collective of a group: complete when all ranks have called it."""

    __slots__ = ("number", "parts", "results", "root", "signature", "waiting")

    def __init__(self, number: int, signature: Signature, size: int, root: int) -> None:
        self.number, self.signature, self.root = number, signature, root
        self.parts: list[Part | None] = [None] * size
        self.results: list[Tensor | None] | None = None
        self.waiting: list[Waiting] = []

    def missing(self) -> list[int]:
        """Group ranks that have not called it."""
        return [rank for rank, part in enumerate(self.parts) if part is None]

    def complete(self, parts: Sequence[Part]) -> None:
        """Compute the result of every rank."""
        size = len(parts)
        values = [part.values for part in parts if part.values is not None]
        kind = self.signature.kind
        if kind == "all-reduce":
            self.results = [_reduced(values, self.signature.detail)] * size
        elif kind == "reduce-scatter":
            self.results = list(_reduced(values, self.signature.detail).view(size, -1))
        elif kind == "all-gather":
            self.results = [torch.cat([each.view(-1) for each in values])] * size
        elif kind == "broadcast":
            self.results = [values[self.root].clone()] * size
        elif kind == "all-to-all":
            self.results = _exchanged(parts)
        else:
            self.results = [None] * size
        self.parts = []


def _reduced(values: Sequence[Tensor], reduction: str) -> Tensor:
    """Sum, maximum or minimum in rank order; half precision is summed in float32."""
    dtype = values[0].dtype
    wide = torch.float32 if dtype in (torch.bfloat16, torch.float16) else dtype
    total = values[0].view(-1).to(wide, copy=True)
    for each in values[1:]:
        if reduction == "sum":
            total.add_(each.view(-1))
        else:
            torch.maximum(total, each.view(-1), out=total) if reduction == "max" else torch.minimum(
                total, each.view(-1), out=total
            )
    return total.to(dtype)


def _exchanged(parts: Sequence[Part]) -> list[Tensor | None]:
    """The rows for each rank, in the order of the senders."""
    for sender, sent in enumerate(parts):
        for receiver, received in enumerate(parts):
            if sent.send[receiver] != received.receive[sender]:
                raise LayoutError(
                    f"in an all-to-all of {len(parts)} ranks the group's rank {sender} sends {sent.send[receiver]} "
                    f"rows to rank {receiver}, which expects {received.receive[sender]}; give the same number"
                )
    rows = [part.values.split(list(part.send)) for part in parts if part.values is not None]
    return [torch.cat([each[rank] for each in rows]) for rank in range(len(parts))]


@dataclass(eq=False)
class Receive:
    """A receive that waits for its message."""

    buffer: Tensor
    message: Tensor | None = None
    waiting: Waiting | None = None


class Channel:
    """The collectives and messages of a group, shared by its ranks; ``ranks`` are global."""

    def __init__(self, ranks: tuple[int, ...], scheduler: Scheduler) -> None:
        self.ranks, self.scheduler = ranks, scheduler
        self._meetings: dict[int, Meeting] = {}
        self._messages: dict[tuple[int, int, int], deque[Tensor]] = {}
        self._receives: dict[tuple[int, int, int], deque[Receive]] = {}

    def call(self, index: int, number: int, signature: Signature, part: Part, root: int = 0) -> Meeting:
        """The group's rank ``index`` makes its call ``number``; LayoutError if another rank's is a different one."""
        meeting = self._meetings.get(number)
        if meeting is None:
            meeting = self._meetings[number] = Meeting(number, signature, len(self.ranks), root)
        elif meeting.signature != signature:
            first = next(rank for rank, each in enumerate(meeting.parts) if each is not None)
            raise LayoutError(
                f"call {number} over ranks {in_short(self.ranks)} is {signature} on rank {self.ranks[index]} and "
                f"{meeting.signature} on rank {self.ranks[first]}; all ranks of a group must make the same calls in "
                "the same order"
            )
        meeting.parts[index] = part
        parts = [each for each in meeting.parts if each is not None]
        if len(parts) == len(self.ranks):
            del self._meetings[number]
            meeting.complete(parts)
            for each in meeting.waiting:
                self.scheduler.resume(each)
        return meeting

    def send(self, key: tuple[int, int, int], message: Tensor) -> None:
        """Send ``message``, which must not change any more; ``key``: sender, receiver and tag."""
        wanted = self._receives.get(key)
        if not wanted:
            self._messages.setdefault(key, deque()).append(message)
            return
        receive = wanted.popleft()
        receive.message = message
        if receive.waiting is not None:
            self.scheduler.resume(receive.waiting)

    def receive(self, key: tuple[int, int, int], buffer: Tensor) -> Receive:
        """Receive the next message of ``key`` in the order of sending."""
        receive, arrived = Receive(buffer), self._messages.get(key)
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
