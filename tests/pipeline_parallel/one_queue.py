"""Messages of which a rank runs one after another in each group, as NCCL does with one communicator for all links."""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch.distributed as dist
from torch import Tensor

PATIENCE = 10.0
"""Seconds after which a wait counts as a deadlock."""


class Queued:
    """The handle of a message in a queue."""

    def __init__(self, start: Callable[[], dist.Work]) -> None:
        self._start = start
        self._done = threading.Event()

    def run(self) -> None:
        """Send or receive; gloo's sends end when the receive is posted."""
        self._start().wait()
        self._done.set()

    def wait(self) -> bool:
        """Wait for it and all messages before it."""
        if not self._done.wait(PATIENCE):
            raise RuntimeError("DEADLOCK: a message waits behind another one of its group")
        return True

    def is_completed(self) -> bool:
        """Whether it has been sent or received."""
        return self._done.is_set()


@contextmanager
def one_queue_for_each_group() -> Iterator[None]:
    """Send and receive the messages of each group in the order of the calls, each after the end of the one before."""
    queues: dict[dist.ProcessGroup, queue.SimpleQueue[Queued]] = {}

    def work_off(waiting: queue.SimpleQueue[Queued]) -> None:
        while True:
            waiting.get().run()

    def put(real: Callable[..., Any]) -> Callable[..., Queued]:
        def called(tensor: Tensor, *, group: dist.ProcessGroup, **peer: int) -> Queued:
            if group not in queues:
                queues[group] = queue.SimpleQueue()
                threading.Thread(target=work_off, args=(queues[group],), daemon=True).start()
            message = Queued(lambda: real(tensor, group=group, **peer))
            queues[group].put(message)
            return message

        return called

    with mock.patch.object(dist, "isend", put(dist.isend)), mock.patch.object(dist, "irecv", put(dist.irecv)):
        yield
