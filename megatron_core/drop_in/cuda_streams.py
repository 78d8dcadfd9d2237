"""Streams, events and contexts of ``torch.cuda`` on a CPU, which completes each operator before the next."""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from megatron_core.drop_in.cuda_calls import CPU


class Event(torch.Event):
    """An event of a CPU: all work before it is complete when it is recorded."""

    recorded: float | None

    def __new__(cls, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> Event:
        event = super().__new__(cls, device=CPU)
        event.recorded = None
        return event

    def record(self, stream: Any = None) -> None:
        """Store the host's time."""
        self.recorded = time.perf_counter()

    def elapsed_time(self, end_event: Any) -> float:
        """Milliseconds from this event to ``end_event``."""
        if self.recorded is None or end_event.recorded is None:
            raise ValueError("both events must be recorded before their elapsed time is read")
        return 1e3 * float(end_event.recorded - self.recorded)

    def query(self) -> bool:
        """True: the work is complete."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


class Stream(torch.Stream):
    """The stream of a CPU."""

    cuda_stream, priority = 0, 0

    def __new__(cls, device: Any = None, priority: int = 0, **kwargs: Any) -> Stream:
        return super().__new__(cls, device=CPU)

    @classmethod
    def priority_range(cls) -> tuple[int, int]:
        """The lowest and the highest priority."""
        return 0, 0

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """True: the work is complete."""
        return True

    def record_event(self, event: Any = None) -> Any:
        """Record ``event``, or a new one, and return it."""
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        _OUTER.contexts = [*_outer_contexts(), context := StreamContext(self)]
        context.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        *_OUTER.contexts, context = _outer_contexts()
        context.__exit__(*error)


class ExternalStream(Stream):
    """A stream that another library made."""

    def __new__(cls, stream_ptr: int, device: Any = None, **kwargs: Any) -> ExternalStream:
        return torch.Stream.__new__(cls, device=CPU)


DEFAULT = Stream()
_OUTER = threading.local()
"""Of each thread: its current stream, and the contexts of streams that are entered themselves."""


def _outer_contexts() -> list[StreamContext]:
    return getattr(_OUTER, "contexts", [])


def default_stream(device: Any = None) -> Stream:
    """The only stream of a CPU on which work runs if no other one is current."""
    return DEFAULT


def current_stream(device: Any = None) -> Any:
    """The stream of the innermost context, or of ``set_stream``."""
    return getattr(_OUTER, "stream", DEFAULT)


def set_stream(stream: Any) -> None:
    """Make ``stream`` the current one; None has no effect."""
    if stream is not None:
        _OUTER.stream = stream


class StreamContext:
    """Makes ``stream`` the current one; None has no effect."""

    def __init__(self, stream: Any) -> None:
        self.stream = stream

    def __enter__(self) -> None:
        self.outer = current_stream()
        set_stream(self.stream)

    def __exit__(self, *_: object) -> None:
        set_stream(self.outer)


def stream(stream: Any) -> StreamContext:
    """Return a context in which ``stream`` is the current one."""
    return StreamContext(stream)


class device:
    """A context that selects a device, of which there is one."""

    def __init__(self, device: Any) -> None:
        self.idx, self.prev_idx = 0, 0

    def __enter__(self) -> None: ...

    def __exit__(self, *_: object) -> None: ...


class device_of(device):
    """The same for the device of a tensor."""


def complete_cpu_streams() -> None:
    """Add the methods that ``torch.cpu.Stream`` lacks and FSDP calls when it offloads."""

    def record_event(self: Any, event: Any = None) -> Any:
        event = event or torch.cpu.Event()
        event.record()
        return event

    names: dict[str, Any] = {"synchronize": lambda self: None, "query": lambda self: True, "record_event": record_event}
    for name, method in names.items():
        setattr(torch.cpu.Stream, name, method)
