"""Receiving: messages come in the order in which a rank sends them, and each goes to the first receive of its tag."""

from __future__ import annotations

import ctypes
from collections import defaultdict
from typing import Any

import torch.distributed as dist
from torch import Tensor

from megatron_core.parallel.shared_memory.work import Members, Pending

NOT_YET, OTHER_TAG, OTHER_SIZE = 1, -1, -2
"""The numbers of csrc/cpu/transport/transport.h."""


class Receive(Pending):
    """The handle of a receive; done when its tensor is filled."""

    def __init__(self, messages: Messages, x: Tensor, address: int, sender: int, tag: int) -> None:
        super().__init__(messages.members, "receive", 0, None, [x])
        self.address, self.bytes, self.sender, self.tag = address, x.nbytes, sender, tag
        self._messages = messages

    def _attempt(self, slice_: int) -> int:
        return self._messages.advance(self, slice_)

    def _source_rank(self) -> int:
        """For torch."""
        return self.sender


class Messages:
    """What this rank receives from the others of a group."""

    def __init__(self, native: Any, group: int, members: Members) -> None:
        self.members, self._native, self._group = members, native, group
        self._next: dict[int, int] = defaultdict(int)  # number of each sender's next message
        self._wanted: dict[int, list[Receive]] = defaultdict(list)
        self._waiting: dict[int, list[tuple[int, int]]] = defaultdict(list)  # number and tag of those not yet received

    def receive(self, x: Tensor, address: int, sender: int, tag: int) -> dist.Work:
        """Begin to receive ``x``."""
        work = Receive(self, x, address, sender, tag)
        for position, (number, tag_of) in enumerate(self._waiting[sender]):
            if tag_of == tag:
                del self._waiting[sender][position]
                self._take(number, work, 0)
                return work
        self._wanted[sender].append(work)
        return work

    def advance(self, work: Receive, slice_: int) -> int:
        """Hand out the sender's messages until ``work`` has its own: 0, or 1 + the sender."""
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
        """Give a message that is not for the first receive to the first of its tag, or keep it."""
        found = (ctypes.c_int64 * 5)()
        self._native.posted(self._group, sender, 1, number, found)
        tag = found[3]
        receive = next((each for each in self._wanted[sender] if each.tag == tag), None)
        if receive is None:
            self._waiting[sender].append((number, tag))
        else:
            self._take(number, receive, 0)
            self._wanted[sender].remove(receive)

    def _take(self, number: int, receive: Receive, slice_: int) -> int:
        """Fill a receive with a message, if it is there and has its tag."""
        code = self._native.receive(
            self._group, receive.sender, number, receive.tag, receive.address, receive.bytes, slice_
        )
        if code == OTHER_SIZE:
            found = (ctypes.c_int64 * 5)()
            self._native.posted(self._group, receive.sender, 1, number, found)
            raise RuntimeError(
                f"rank {self.members.ranks[receive.sender]} has sent {found[4]} bytes, and {receive.bytes} are "
                "received; send and receive tensors of one shape and dtype"
            )
        receive.done = code == 0
        return code
