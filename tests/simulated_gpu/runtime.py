"""The functions of torch.cuda and torch.distributed for the simulated GPU."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.simulated_gpu import graphs
from tests.simulated_gpu.device import (
    FRAME,
    LOG,
    Factories,
    Inner,
    Log,
    OnGPU,
    bytes_of,
    line_of_project,
    mapped,
    on_host,
    set_hooks,
)
from tests.simulated_gpu.streams import Event, Stream, index, synchronize, wait_for_posted

GRAPHS = ("CUDAGraph", "graph_pool_handle")
NOT_IN_NCCL = (torch.int16, torch.uint16, torch.uint32, torch.uint64, torch.complex32)
COLLECTIVES = (
    *("all_reduce", "broadcast", "reduce", "all_gather", "all_gather_into_tensor", "reduce_scatter_tensor", "scatter"),
    *("all_to_all_single", "all_to_all", "isend", "irecv", "send", "recv", "gather", "reduce_scatter"),
    *(name for name in ("all_gather_single", "reduce_scatter_single") if hasattr(dist, name)),
)


DEADLOCK = 6.0
"""Seconds after which a device-wide wait counts as a deadlock."""
MEMORY_OF = {"isend": ((), (0,)), "irecv": ((0,), ()), **dict.fromkeys(("all_reduce", "broadcast"), ((0,), ()))}
"""Per collective: the arguments that it writes, and those that it only reads; default: the first and the second."""


class Late:
    """The handle of an asynchronous collective, whose outputs are valid after ``wait``.

    Until then that memory is NaN; changing or freeing it, or the inputs of the collective, is an error.
    """

    def __init__(self, collective: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        name, self._line = collective.__name__, line_of_project()
        written, read = MEMORY_OF.get(name, ((0,), (1,)))
        copies = {at: args[at].clone() for at in (*written, *read)}
        self._work = collective(*[copies.get(at, value) for at, value in enumerate(args)], **kwargs)
        self._arriving = [(args[at], copies[at]) for at in written]
        inputs = [(args[at], copies[at].clone()) for at in read]
        for memory, _ in self._arriving:
            memory.fill_(torch.nan if memory.is_floating_point() else torch.iinfo(memory.dtype).max)
        written_storages = {memory.untyped_storage().data_ptr() for memory, _ in self._arriving}
        for memory, values in inputs:
            if name.startswith("all_gather") and memory.untyped_storage().data_ptr() in written_storages:
                memory.copy_(values)  # this rank's own part of the output does not change
        busy = [memory for memory, _ in self._arriving + inputs]
        self._busy = [(memory, memory.untyped_storage().nbytes(), memory.clone()) for memory in busy]
        LOG.posted = [each for each in LOG.posted if each.is_running] + [self]

    @property
    def is_running(self) -> bool:
        """Whether no wait for it has returned."""
        return bool(self._busy)

    def join(self) -> None:
        """Wait as a device-wide wait does; RuntimeError if it does not complete: the ranks wait for each other."""
        waiter = threading.Thread(target=self._work.wait, daemon=True)
        waiter.start()
        waiter.join(DEADLOCK)
        if waiter.is_alive():
            raise RuntimeError(
                f"DEADLOCK: {line_of_project()} waits for the whole device, also for what was posted at {self._line}"
            )

    def wait(self, timeout: Any = None) -> bool:
        with torch._C.DisableTorchFunction():
            self._work.wait()
            self._finish()
        return True

    def is_completed(self) -> bool:
        done = self._work.is_completed()
        return self.wait() if done else False

    def _finish(self) -> None:
        for memory, size, values in self._busy:
            if memory.untyped_storage().nbytes() != size or not torch.equal(bytes_of(memory), bytes_of(values)):
                raise RuntimeError(f"{self._line}: memory was changed or freed before the collective was waited for")
        for memory, values in self._arriving:
            memory.copy_(values)
            LOG.mark(memory)
        if FRAME.stream is not None:
            FRAME.stream.known = LOG.clock  # only the current stream waits
        self._busy, self._arriving = [], []


PROPERTIES = SimpleNamespace(
    name="simulated", major=9, minor=0, total_memory=2**36, multi_processor_count=4, warp_size=32
)


ALLOCATOR = {"reserved_bytes.all.peak": 2**31, "allocated_bytes.all.peak": 3 * 2**29, "num_alloc_retries": 0}
"""Statistics of the allocator."""


def _set_device(device: Any) -> None:
    LOG.index = FRAME.device = index(device)


def _doubles() -> dict[str, Callable]:
    """Functions of torch.cuda by name; others raise as in a build without CUDA."""
    seed = torch.zeros(16, dtype=torch.uint8)
    return {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_lazy_init": lambda: None,
        "device_count": lambda: 8,
        "current_device": lambda: FRAME.device,
        "set_device": _set_device,
        "device": lambda device: nullcontext(),
        "stream": lambda stream: stream,
        "current_stream": Stream.current,
        "synchronize": synchronize,
        "get_device_properties": lambda device=None: PROPERTIES,
        "get_device_capability": lambda device=None: (9, 0),
        "get_device_name": lambda device=None: "simulated",
        "manual_seed": lambda seed: None,
        "get_rng_state": lambda device="cuda": seed.clone(),
        "set_rng_state": lambda new_state, device="cuda": None,
        **{name: lambda device=None: 2**20 for name in ("memory_allocated", "max_memory_allocated", "memory_reserved")},
        "memory_stats": lambda device=None: ALLOCATOR,
        "mem_get_info": lambda device=None: (2**30, PROPERTIES.total_memory),
        "reset_peak_memory_stats": lambda device=None: None,
        "empty_cache": wait_for_posted,
        "cudart": lambda: SimpleNamespace(cudaHostRegister=_register, cudaHostUnregister=_unregister),
        "check_error": lambda res: None,
    }


def _register(address: int, size: int, flags: int) -> int:
    assert address % 4096 == size % 4096 == flags == 0
    LOG.pinned[address] = torch.empty(0)
    LOG.registered[address] = size
    LOG.allocating.append(threading.current_thread() is threading.main_thread())
    return 0


def _unregister(address: int) -> int:
    LOG.pinned.pop(address)
    LOG.registered.pop(address)
    return 0


def _as_real(real: Callable, double: Callable) -> Callable:
    """``double``, which also refuses arguments that ``real`` does not have."""
    signature = inspect.signature(real)

    def called(*args: Any, **kwargs: Any) -> Any:
        signature.bind(*args, **kwargs)
        return double(*args, **kwargs)

    return called


def _over_gpu(collective: Callable) -> Callable:
    """A collective over the memory of its tensors, with NCCL's restrictions."""

    def memory(each: Tensor) -> Tensor:
        if not isinstance(each, OnGPU) or not each.is_contiguous() or each.dtype in NOT_IN_NCCL:
            where = f"{each.dtype} {list(each.shape)}, strides {each.stride()}, on {each.device}"
            raise RuntimeError(f"NCCL: {collective.__name__} does not take {where}")
        return on_host(each)

    def checked(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = mapped(memory, args), mapped(memory, kwargs)
        if LOG.capture is not None:
            with torch._C.DisableTorchFunction():
                return LOG.capture.note_collective(collective, args, kwargs)
        is_late = kwargs.get("async_op") or collective.__name__ in ("isend", "irecv")
        with torch._C.DisableTorchFunction():
            return Late(collective, args, kwargs) if is_late else collective(*args, **kwargs)

    return checked


def _run_thread(self: threading.Thread, run: Callable = threading.Thread.run) -> None:
    with Inner(), Factories():
        run(self)


@contextmanager
def simulated_gpu() -> Iterator[Log]:
    """Simulate a GPU in this process; groups of torch.distributed pretend to be NCCL and refuse CPU tensors."""
    LOG.__init__()  # type: ignore[misc]
    FRAME.device, FRAME.stream = 0, None
    patches = [
        mock.patch.object(torch.cuda, name, _as_real(getattr(torch.cuda, name), double))
        for name, double in _doubles().items()
    ]
    for name in COLLECTIVES:
        over_gpu = _over_gpu(getattr(dist, name))
        patches += [mock.patch.object(module, name, over_gpu) for module in (dist, dist.distributed_c10d)]
    patches += [mock.patch.object(torch.cuda, "Event", Event), mock.patch.object(torch.cuda, "Stream", Stream)]
    patches += [mock.patch.object(torch.cuda, name, getattr(graphs, name)) for name in GRAPHS]
    patches += [mock.patch.object(saved_tensors_hooks, "__init__", set_hooks)]
    patches += [mock.patch.object(torch.cuda.nccl, "version", lambda: (2, 27, 3))]
    patches += [mock.patch.object(threading.Thread, "run", _run_thread)]
    patches += [mock.patch.object(dist, "get_backend", lambda group=None: "nccl")]
    for patch in patches:
        patch.start()
    try:
        with Inner(), Factories():
            yield LOG
    finally:
        for patch in reversed(patches):
            patch.stop()
