"""Transfers that overlap with computation: copies between a GPU and host memory, and reads and writes of files.

A ``Lane`` runs transfers of one direction in order. Copies of a GPU run in a stream of the lane; events order them with
the computation, so the host waits only where it reads the result. All other transfers run in a helper thread.
"""

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from megatron_core.data_parallel.memory import TransferHandle
from megatron_core.parallel.meter import METER


class Copied:
    """The handle of copies in a stream. With ``for_host`` its ``wait`` blocks the host, else the current stream."""

    def __init__(self, event: torch.cuda.Event, device: torch.device, *, for_host: bool) -> None:
        self._event = event
        self._device = device
        self._for_host = for_host

    def wait(self) -> None:
        """Wait for the copies."""
        if self._for_host:
            self._event.synchronize()
        else:
            torch.cuda.current_stream(self._device).wait_event(self._event)


class Threaded:
    """The handle of a transfer in a helper thread."""

    def __init__(self, future: Future[object]) -> None:
        self._future = future

    def wait(self) -> None:
        """Block the host until the transfer ends; raises the error of the thread."""
        self._future.result()


Direction = Literal["host copy_out", "host copy_in", "disk read", "disk write"]
"""The names of transfers in the meter; ``out`` is from the device to host memory."""


class Lane:
    """Runs transfers of one direction in the order of their start, while the computation continues."""

    def __init__(self, name: Direction, device: torch.device) -> None:
        """``device``: the device of the copies; the CPU for files."""
        self._name = name
        self._device = device
        # A stream for each lane: copies to and from a GPU use separate engines and can run at the same time.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._executor = ThreadPoolExecutor(1, name.replace(" ", "-")) if self._stream is None else None

    def start(self, call: Callable[[], object], size: int, *, for_host: bool = False) -> TransferHandle:
        """Start ``call``, which transfers ``size`` bytes, after everything that the current stream has to do.

        The caller must neither change nor free the memory of ``call`` before it has waited for the handle.
        ``for_host``: whether the host reads the result, and not the device.
        """
        where, operation = self._name.split()
        return METER.run(operation, where, size, lambda: self._started(call, for_host=for_host))

    def copy(self, to: Tensor, source: Tensor, *, for_host: bool = False) -> TransferHandle:
        """Start to copy ``source`` to ``to``."""
        return self.start(lambda: to.copy_(source, non_blocking=True), source.nbytes, for_host=for_host)

    def _started(self, call: Callable[[], object], *, for_host: bool) -> TransferHandle:
        if self._stream is None:
            assert self._executor is not None
            return Threaded(self._executor.submit(torch.no_grad()(call)))  # autograd is on at first in a thread
        # The source must be complete, and no kernel may still read the target.
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.no_grad(), torch.cuda.stream(self._stream):
            call()
        return Copied(self._stream.record_event(), self._device, for_host=for_host)


def lane(name: Direction, device: torch.device | None = None) -> Lane:
    """Return this process's lane of a direction; without ``device`` it is one for files."""
    # The process is a part of the key: after a fork a child needs a thread of its own.
    return _lane(name, device or torch.device("cpu"), os.getpid())


@cache
def _lane(name: Direction, device: torch.device, process: int) -> Lane:
    return Lane(name, device)  # a thread does not survive a fork


def is_on_host(tensor: Tensor) -> bool:
    """Whether the tensor is already in host memory."""
    return tensor.device.type == "cpu"


def empty_on_host(like: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Allocate host memory for a tensor, pinned if it is on a GPU.

    torch keeps freed pinned memory and reuses it after the copies in all streams have ended.
    """
    return torch.empty_like(like, dtype=dtype, device="cpu", pin_memory=like.is_cuda)
