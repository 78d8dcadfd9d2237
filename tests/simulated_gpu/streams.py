"""Streams and events of the simulated GPU.

The computation has one stream. A copy to or from pinned memory in another stream completes when the computation waits
for an event after it, or the host synchronizes with that event. Until then its target is NaN, and changing or freeing
source or target is an error. It is also an error if the stream has not waited for the computation that wrote or
allocated the memory, because the device may then reuse or fill that memory later.
"""

from __future__ import annotations

import time
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from tests.simulated_gpu.device import FRAME, LOG, OnGPU, bytes_of, line_of_project, on_host


class Memory:
    """A tensor of a copy, and its bytes; the memory of the device may be freed by the program."""

    def __init__(self, tensor: Tensor) -> None:
        self.is_gpu = isinstance(tensor, OnGPU)
        plain = on_host(tensor)
        self._kept = None if self.is_gpu else plain
        self._storage = StorageWeakRef(plain.untyped_storage())
        self._view = plain.dtype, plain.storage_offset(), plain.size(), plain.stride()
        self.bytes = bytes_of(plain).clone()

    def tensor(self) -> Tensor | None:
        """The tensor in CPU memory, or None if it was freed."""
        if self._kept is not None:
            return self._kept
        storage = torch.UntypedStorage._new_with_weak_ptr(self._storage.cdata)
        dtype, *view = self._view
        return None if storage is None else torch.empty(0, dtype=dtype).set_(storage, *view)


class Copy:
    """A copy in a stream."""

    def __init__(self, stream: Stream, to: Tensor, source: Tensor) -> None:
        self.stream, self.line = stream, line_of_project()
        with Plain():
            self.values = on_host(source).to(to.dtype, copy=True)
            self.source = Memory(source)
            on_host(to).fill_(torch.nan if to.is_floating_point() else 1)
            self.to = Memory(to)

    def check(self) -> None:
        """RuntimeError if the program has changed or freed memory of the copy."""
        with Plain():
            for memory in (self.source, self.to):
                now = memory.tensor()
                if now is None or not torch.equal(bytes_of(now), memory.bytes):
                    what = "freed" if now is None else "changed"
                    raise RuntimeError(f"{self.line}: memory was {what} before the copy in another stream ended")

    def finish(self, *, for_host: bool) -> None:
        """Complete the copy for the computation, or for the host."""
        self.check()
        to, source = self.to.tensor(), self.source.tensor()
        assert to is not None and source is not None, "checked"
        with Plain():
            if self.to.is_gpu or for_host:
                to.copy_(self.values)
        if self.to.is_gpu and not for_host:
            LOG.leaving.append((source, source.clone(), self.line))
        elif not self.to.is_gpu and not for_host:
            LOG.arriving.append((to, self.values))


class Plain:
    """Operators inside are the CPU's."""

    def __enter__(self) -> None:
        self._guards = torch._C._DisableTorchDispatch(), torch._C.DisableTorchFunction()
        self._guards[1].__enter__()

    def __exit__(self, *error: object) -> None:
        self._guards[1].__exit__(*error)
        del self._guards


class Stream:
    """torch.cuda.Stream."""

    cuda_stream = 0
    of_computation = False

    def __init__(self, device: Any = None, priority: int = 0) -> None:
        self.device = FRAME.device if device is None else index(device)
        self.known = 0
        """The moment of the computation for which this stream has waited."""
        self.copies: list[Copy] = []
        self.started = 0
        LOG.streams.append(self)

    @classmethod
    def current(cls, device: Any = None) -> Stream:
        """torch.cuda.current_stream."""
        if FRAME.stream is not None:
            return FRAME.stream
        stream = cls(device)
        stream.of_computation = True
        LOG.streams.remove(stream)
        return stream

    def __enter__(self) -> None:
        """``torch.cuda.stream``, which resets the thread's device at its end; this creates a context there."""
        if self.device != FRAME.device:
            raise RuntimeError(
                f"a stream of GPU {self.device} in a thread of GPU {FRAME.device}, whose memory it takes"
            )
        FRAME.stream = None if self.of_computation else self

    def __exit__(self, *error: object) -> None:
        FRAME.stream = None

    def copy(self, to: Tensor, source: Tensor) -> None:
        """Start a copy between the devices, one of which is pinned memory."""
        for each in self.copies:
            each.check()
        for memory in (to, source):
            if isinstance(memory, OnGPU) and LOG.written.get(memory.untyped_storage().data_ptr(), 0) > self.known:
                raise RuntimeError(f"{line_of_project()}: a copy in another stream does not wait for the computation")
        for memory, values in LOG.arriving:
            if memory.untyped_storage().data_ptr() == source.untyped_storage().data_ptr():
                memory.copy_(values)
        target = to.untyped_storage().data_ptr()  # the device works in order: earlier reads of it have ended
        LOG.leaving[:] = [each for each in LOG.leaving if each[0].untyped_storage().data_ptr() != target]
        self.started += 1
        self.copies.append(Copy(self, to, source))

    def complete(self, number: int, *, for_host: bool) -> None:
        """Complete the copies up to a number."""
        count = len(self.copies) - (self.started - number)
        done, self.copies = self.copies[: max(count, 0)], self.copies[max(count, 0) :]
        for each in done:
            each.finish(for_host=for_host)
        for each in self.copies:
            each.check()

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def wait_event(self, event: Event) -> None:
        assert event.at, "the event has not been recorded"
        if self.of_computation and event.stream is not None:
            event.stream.complete(event.number, for_host=False)
        elif not self.of_computation and event.stream is None:
            self.known = max(self.known, event.clock)

    def wait_stream(self, stream: Stream) -> None:
        self.wait_event(stream.record_event())

    def synchronize(self) -> None:
        if self.of_computation:
            LOG.stall("stream")
        else:
            LOG.stalls[f"{line_of_project()} stream"] += 1
            self.complete(self.started, for_host=True)


class Event:
    """torch.cuda.Event, on the host's clock."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.timed, self.at = enable_timing, 0.0
        self.stream: Stream | None = None
        self.number = self.clock = 0

    def record(self, stream: Stream | None = None) -> None:
        stream = Stream.current() if stream is None else stream
        assert isinstance(stream, Stream)
        self.at, self.clock = time.perf_counter(), LOG.clock
        self.stream, self.number = None if stream.of_computation else stream, stream.started

    def synchronize(self) -> None:
        if self.stream is None:
            LOG.stall("event")
        else:
            LOG.stalls[f"{line_of_project()} event"] += 1
            self.stream.complete(self.number, for_host=True)

    def query(self) -> bool:
        return True

    def elapsed_time(self, end_event: Event) -> float:
        assert self.timed and end_event.timed and self.at and end_event.at, "both must have timing and be recorded"
        return (end_event.at - self.at) * 1e3


def wait_for_posted() -> None:
    """Wait for the kernels of all streams, which include messages that are posted ahead."""
    for late in LOG.posted:
        if late.is_running:
            late.join()


def synchronize(device: Any = None) -> None:
    """torch.cuda.synchronize."""
    wait_for_posted()
    LOG.stall("device")
    for stream in LOG.streams:
        stream.complete(stream.started, for_host=True)


def index(device: Any) -> int:
    """The number of a device."""
    return device if isinstance(device, int) else torch.device(device).index or 0
