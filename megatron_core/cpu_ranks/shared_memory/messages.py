"""Receiving: messages arrive in sending order, and each is matched with the first pending receive of its tag."""

import ctypes
from collections import defaultdict
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_core.cpu_ranks.shared_memory.work import GroupProcesses, Pending

NOT_YET = 1
OTHER_TAG = -1
OTHER_SIZE = -2
"""Constants of csrc/cpu/transport/transport.h."""


class ReceiveHandle(Pending):
    """The handle of a receive."""

    def __init__(self, messages: "IncomingMessages", x: Tensor, address: int, sender: int, tag: int) -> None:
        super().__init__(messages.members, "receive", 0, None, [x])
        self.address = address
        self.bytes = x.nbytes
        self.sender = sender
        self.tag = tag
        self._messages = messages

    def _attempt(self, slice_: int) -> int:
        return self._messages.advance(self, slice_)

    def _source_rank(self) -> int:
        """Called by torch."""
        return self.sender


class IncomingMessages:
    """The incoming messages of a group."""

    def __init__(self, native: Any, group: int, members: GroupProcesses) -> None:
        self.members = members
        self._native = native
        self._group = group
        self._next: dict[int, int] = defaultdict(int)  # number of the next message of each sender
        self._wanted: dict[int, list[ReceiveHandle]] = defaultdict(list)
        self._unmatched: dict[int, list[tuple[int, int]]] = defaultdict(list)  # number and tag of each message

    def receive(self, x: Tensor, address: int, sender: int, tag: int) -> dist.Work:
        """Start receiving into ``x``."""
        work = ReceiveHandle(self, x, address, sender, tag)
        for position, (number, tag_of) in enumerate(self._unmatched[sender]):
            if tag_of == tag:
                del self._unmatched[sender][position]
                self._take(number, work, 0)
                return work
        self._wanted[sender].append(work)
        return work

    def advance(self, work: ReceiveHandle, slice_: int) -> int:
        """Deliver the sender's messages until ``work`` is complete; returns 0, or 1 + sender if a message is
        missing."""
        wanted = self._wanted[work.sender]
        while not work.done:
            code = self._take(self._next[work.sender], wanted[0], slice_)
            if code == NOT_YET:
                return 1 + work.sender
            if code == 0:
                wanted.pop(0)
            else:
                self._sort(work.sender, self._next[work.sender])
            self._next[work.sender] += 1
        return 0

    def _sort(self, sender: int, number: int) -> None:
        """Deliver a message to the first receive of its tag, or keep it."""
        header = (ctypes.c_int64 * 5)()
        self._native.posted(self._group, sender, 1, number, header)
        tag = header[3]
        receive = next((wanted for wanted in self._wanted[sender] if wanted.tag == tag), None)
        if receive is None:
            self._unmatched[sender].append((number, tag))
        else:
            self._take(number, receive, 0)
            self._wanted[sender].remove(receive)

    def _take(self, number: int, receive: ReceiveHandle, slice_: int) -> int:
        """Try to fill a receive with a message, if it has arrived with the right tag."""
        code = self._native.receive(
            self._group, receive.sender, number, receive.tag, receive.address, receive.bytes, slice_
        )
        if code == OTHER_SIZE:
            header = (ctypes.c_int64 * 5)()
            self._native.posted(self._group, receive.sender, 1, number, header)
            raise RuntimeError(
                f"rank {self.members.ranks[receive.sender]} sent {header[4]} bytes, but this rank expects "
                f"{receive.bytes}; send and receive tensors of equal shape and dtype"
            )
        receive.done = code == 0
        return code
