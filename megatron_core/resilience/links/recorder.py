"""Records checksums of the inputs and outputs of collectives and messages between stages, for a comparison.

While ``LINKS.checking`` is set, every collective of ``parallel.collectives`` computes checksums of what this rank sends
and, once it is complete, of what it received. Nothing more is sent until ``link_checks`` compares the checksums of the
ranks. A message between pipeline stages carries its checksum: the bytes of a tensor, followed by hash + number of
the message, which detects outdated messages. Otherwise the cost is one check of a flag for each call.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor

from megatron_core.parallel.groups import Group
from megatron_core.parallel.rank_local import Forwarding, RankLocal
from megatron_core.parallel.watched import OBSERVATION, Parts, Watched
from megatron_core.reports.hash_sums import bit_hash
from megatron_core.resilience.links.checksums import block_sums, maxima
from megatron_core.resilience.links.faults import LinkFaults

_WORD = 8
"""Bytes of a checksum."""


@dataclass
class RecordedCall:
    """One collective of this rank."""

    what: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    iteration: int
    """Step of training in which it was called, counted from 1."""
    recording: int
    """Number of the ``begin`` after which it was called."""
    number: int
    """Number of the call in its group since that ``begin``, from 1."""
    sent: list[Tensor] = field(default_factory=list)
    """Hash of what each rank of the group should receive from this one; for a reduction its block sums."""
    received: list[Tensor] = field(default_factory=list)
    """Hash of what arrived from each rank; for a reduction block sums and the hash of the result."""
    is_sum: bool = False
    is_maximum: bool = False
    complete: bool = False

    @property
    def key(self) -> tuple[int, int]:
        """The identity of the call on all ranks of its group."""
        return self.recording, self.number

    def __str__(self) -> str:
        """Kind, shape and dtype."""
        return f"{self.what} of {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


@dataclass
class Delivery:
    """A message between pipeline stages whose checksum travelled with it."""

    sender: int
    receiver: int
    number: int
    shape: tuple[int, ...]
    dtype: torch.dtype
    iteration: int
    right: Tensor | bool
    """Whether the checksum is right."""

    def __str__(self) -> str:
        """Kind, shape and dtype."""
        return f"message of {list(self.shape)} {str(self.dtype).removeprefix('torch.')}"


class LinkRecorder:
    """The calls of this rank, and the faults to inject into what it receives."""

    def __init__(self) -> None:
        self.checking = False
        """Whether collectives are recorded, and messages between stages carry checksums."""
        self.seals_messages = False
        """Whether messages between stages always carry checksums."""
        self.iteration = 0
        self.calls: dict[Group, list[RecordedCall]] = {}
        self.deliveries: list[Delivery] = []
        self.faults = LinkFaults()
        self._recording = 0
        self._numbers: dict[Group, int] = {}
        self._counts: dict[tuple[int, int], int] = {}

    @property
    def active(self) -> bool:
        """Whether calls have to be wrapped."""
        return self.checking or self.faults.active

    @property
    def sealing(self) -> bool:
        """Whether messages between stages carry checksums now."""
        return self.checking or self.seals_messages

    def begin(self, iteration: int) -> None:
        """Record the calls of step ``iteration`` from now on.

        Calls since the previous ``begin`` stay recorded: those of the update are not compared yet. Older calls, which
        were still incomplete in a whole comparison, are dropped, so that calls without a ``wait`` do not accumulate.
        """
        self.checking = True
        self.iteration = iteration
        previous = self._recording
        self._recording = self._recording + 1
        for group, calls in list(self.calls.items()):
            self.calls[group] = [call for call in calls if call.recording == previous]
        self._numbers.clear()

    def end(self) -> None:
        """Record no further calls; recorded calls may still complete."""
        self.checking = False

    def forget(self) -> None:
        """Drop all records."""
        self.end()
        self.calls.clear()
        self.deliveries.clear()
        self._counts.clear()
        self._recording = 0

    def message_number(self, sender: int, receiver: int) -> int:
        """The number of the next message with a checksum from ``sender`` to ``receiver``, equal at both ends."""
        self._counts[sender, receiver] = self._counts.get((sender, receiver), 0) + 1
        return self._counts[sender, receiver]

    def record(
        self, what: str, group: Group, x: Tensor, *, is_sum: bool = False, is_maximum: bool = False
    ) -> RecordedCall:
        """Add a call."""
        number = self._numbers[group] = self._numbers.get(group, 0) + 1
        shape = tuple(x.shape)
        call = RecordedCall(
            what, shape, x.dtype, self.iteration, self._recording, number, is_sum=is_sum, is_maximum=is_maximum
        )
        self.calls.setdefault(group, []).append(call)
        return call

    @property
    def watches_messages(self) -> bool:
        """Whether received messages have a checksum, or are damaged on purpose."""
        return self.sealing or self.faults.active

    def moved(
        self, call: Callable[[], Any], what: str, group: Group, x: Tensor, to_each: Parts, from_each: Parts
    ) -> Callable[[], Any]:
        """See ``Observer.moved``."""
        if _is_captured(x):
            return call

        def run() -> Any:
            record = self.record(what, group, x) if self.checking else None
            if record is not None:
                record.sent = _hashes(to_each(), x.device)
            return _finished(call(), after(record))

        def after(record: RecordedCall | None) -> Callable[[], None]:
            def complete() -> None:
                received = from_each()
                self.faults.apply(what, group, [tensor for i, tensor in enumerate(received) if i != group.rank()])
                if record is not None:
                    record.received = _hashes(received, x.device)
                    record.complete = True

            return complete

        return run

    def summed(
        self, call: Callable[[], Any], what: str, group: Group, x: Tensor, result: Tensor, maximum: bool
    ) -> Callable[[], Any]:
        """See ``Observer.summed``."""
        if _is_captured(x):
            return call
        count = x.numel() // max(result.numel(), 1) or 1

        def sums(of: Tensor, count: int) -> Tensor:
            return maxima(of, count) if maximum and of.numel() else block_sums(of, count)

        def run() -> Any:
            record = self.record(what, group, x, is_sum=True, is_maximum=maximum) if self.checking else None
            if record is not None:
                record.sent = [sums(x, count)]

            def complete() -> None:
                self.faults.apply(what, group, [result])
                if record is not None:
                    record.received = [sums(result, 1), bit_hash(result)]
                    record.complete = True

            return _finished(call(), complete)

        return run

    def message(self, tensor: Tensor, sender: int, receiver: int) -> Tensor:
        """The message with its checksum."""
        return sealed(tensor, self.message_number(sender, receiver))

    def receive(self, buffer: Tensor, sender: int, receiver: int, start: Callable[[Tensor], Any]) -> Watched:
        """See ``Observer.receive``; record whether the checksum is right when the message has arrived."""
        if not self.sealing:
            return Watched(start(buffer), lambda: self.faults.apply_to_message(sender, receiver, buffer))
        message = empty_message(buffer.nbytes, buffer.device)
        iteration = self.iteration
        number = self.message_number(sender, receiver)

        def arrived() -> None:
            self.faults.apply_to_message(sender, receiver, message)
            buffer.copy_(payload(message, tuple(buffer.shape), buffer.dtype))
            right = is_message_intact(message, buffer.nbytes, number)
            shape = tuple(buffer.shape)
            self.deliveries.append(Delivery(sender, receiver, number, shape, buffer.dtype, iteration, right))

        return Watched(start(message), arrived)


LINKS: LinkRecorder = cast(LinkRecorder, Forwarding(RankLocal(LinkRecorder)))
"""The recorder of this rank."""
OBSERVATION.observer = LINKS


def _finished(work: Any, after: Callable[[], None]) -> Any:
    """Call ``after`` when ``work`` is complete: now, if it is None."""
    if work is None:
        after()
        return None
    return Watched(work, after)


def _hashes(tensors: Sequence[Tensor | None], device: torch.device) -> list[Tensor]:
    known: dict[int, Tensor] = {}  # an all-gather sends one tensor to all
    nothing = torch.zeros((), dtype=torch.int64, device=device)
    for tensor in tensors:
        if tensor is not None and id(tensor) not in known:
            known[id(tensor)] = bit_hash(tensor)
    return [nothing if tensor is None else known[id(tensor)] for tensor in tensors]


def _is_captured(x: Tensor) -> bool:
    """Whether a CUDA graph is being captured, which would repeat the checksums but not the records."""
    return x.is_cuda and torch.cuda.is_current_stream_capturing()


def sealed(x: Tensor, number: int) -> Tensor:
    """The bytes of a contiguous tensor with its checksum, as uint8."""
    message = empty_message(x.numel() * x.element_size(), x.device)
    data, word = _split(message, x.numel() * x.element_size())
    data.copy_(x.detach().view(-1).view(torch.uint8))
    word.copy_(bit_hash(data) + number)
    return message


def empty_message(size: int, device: torch.device) -> Tensor:
    """A buffer for the message of a tensor of ``size`` bytes."""
    return torch.zeros(-(-size // _WORD) * _WORD + _WORD, dtype=torch.uint8, device=device)


def payload(message: Tensor, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The tensor within a message, as a view."""
    size = torch.Size(shape).numel() * dtype.itemsize
    return message[:size].view(dtype).view(shape)


def is_message_intact(message: Tensor, size: int, number: int) -> Tensor:
    """Whether the checksum of a message fits its ``size`` bytes and its ``number``: a bool on the device."""
    data, word = _split(message, size)
    return bit_hash(data) + number == word


def _split(message: Tensor, size: int) -> tuple[Tensor, Tensor]:
    return message[:size], message[-_WORD:].view(torch.int64)[0]
