"""``torch.cuda`` as a description of the CPU, for programs that run with ``--cpu``."""

from __future__ import annotations

import contextlib
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NoReturn

import torch

from megatron_core.drop_in.cuda_calls import CPU, in_program

CONSTANTS: dict[str, Any] = {
    "current_device": 0,
    "device_count": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
    "get_device_name": "CPU",
    "get_device_capability": (0, 0),
    "get_arch_list": [],
    "is_bf16_supported": True,
    "is_current_stream_capturing": False,
    "memory_stats": defaultdict(int),
    "can_device_access_peer": False,
    "memory_snapshot": [],
    "memory_summary": "",
    **dict.fromkeys(("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved"), 0),
    **dict.fromkeys(("utilization", "temperature", "power_draw", "clock_rate"), 0),
}
"""Values that functions of ``torch.cuda`` return."""
WITHOUT_EFFECT = (
    *("init", "set_device", "synchronize", "empty_cache", "ipc_collect", "set_stream"),
    *("reset_peak_memory_stats", "reset_max_memory_allocated", "reset_max_memory_cached"),
    *("reset_accumulated_memory_stats", "set_per_process_memory_fraction"),
)
NOT_ON_A_CPU = ("CUDAGraph", "graph", "graph_pool_handle", "make_graphed_callables", "MemPool", "use_mem_pool")
"""Names that raise NotImplementedError when they are called."""
NO_HISTORY = ("_record_memory_history", "_dump_snapshot")
"""Names of ``torch.cuda.memory`` that raise NotImplementedError, too."""
TYPES = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
"""The classes ``torch.cuda.FloatTensor`` and so on, which are those of the CPU."""


class Event:
    """An event of a CPU: all work before it is complete when it is recorded."""

    def __init__(self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False) -> None:
        self.recorded: float | None = None

    def record(self, stream: Any = None) -> None:
        """Store the host's time."""
        self.recorded = time.perf_counter()

    def elapsed_time(self, end_event: Event) -> float:
        """Milliseconds from this event to ``end_event``."""
        if self.recorded is None or end_event.recorded is None:
            raise ValueError("both events must be recorded before their elapsed time is read")
        return 1e3 * (end_event.recorded - self.recorded)

    def query(self) -> bool:
        """True: the work is complete."""
        return True

    def wait(self, stream: Any = None) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""


class Stream:
    """The stream of a CPU, which completes each operator before the next."""

    device, device_index, cuda_stream, stream_id, priority = CPU, 0, 0, 0, 0

    def __init__(self, device: Any = None, priority: int = 0, **kwargs: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None:
        """Return at once."""

    def wait_event(self, event: Any) -> None:
        """Return at once."""

    def synchronize(self) -> None:
        """Return at once."""

    def query(self) -> bool:
        """True: the work is complete."""
        return True

    def record_event(self, event: Event | None = None) -> Event:
        """Record ``event``, or a new one, and return it."""
        event = event or Event()
        event.record()
        return event

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None: ...


class AnyGenerator(type(torch._C.Generator)):  # type: ignore[misc]
    """Lets ``isinstance`` accept the generators that torch makes itself."""

    def __instancecheck__(cls, instance: object) -> bool:
        return issubclass(type(instance), torch._C.Generator)


class Generator(torch._C.Generator, metaclass=AnyGenerator):
    """A generator of the CPU, whichever device it is asked for."""

    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls)


class Generators(tuple[torch.Generator, ...]):
    """The CPU's generator as that of each device."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


def install() -> None:
    """Replace the functions and classes of ``torch.cuda`` in this process."""
    cuda: Any = torch.cuda
    for name, value in CONSTANTS.items():
        setattr(cuda, name, lambda *args, value=value, **kwargs: value)
    for name in WITHOUT_EFFECT:
        setattr(cuda, name, lambda *args, **kwargs: None)
    for name in NOT_ON_A_CPU:
        setattr(cuda, name, refusal(f"torch.cuda.{name}"))
    for name in NO_HISTORY:
        setattr(cuda.memory, name, refusal(f"torch.cuda.memory.{name}"))
    for name in TYPES:
        setattr(cuda, f"{name}Tensor", getattr(torch, f"{name}Tensor"))
    for name in ("is_available", "is_initialized"):
        setattr(cuda, name, lambda: in_program(sys._getframe(1).f_code.co_filename))
    real = cuda.get_device_properties

    def get_device_properties(*args: Any, **kwargs: Any) -> Any:
        if not in_program(sys._getframe(1).f_code.co_filename):
            return real(*args, **kwargs)  # an error, after which libraries use their code for CPUs
        memory = host_memory("SC_PHYS_PAGES")
        return SimpleNamespace(name="CPU", major=0, minor=0, total_memory=memory, multi_processor_count=os.cpu_count())

    cuda.get_device_properties = get_device_properties
    cuda.mem_get_info = lambda *args: (host_memory("SC_AVPHYS_PAGES"), host_memory("SC_PHYS_PAGES"))
    _install_streams(cuda)
    _install_generators(cuda)
    _install_profiling(cuda)


def host_memory(pages: str) -> int:
    """Bytes of the host's memory: ``pages`` is a name of ``os.sysconf``."""
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def refusal(name: str) -> Callable[..., NoReturn]:
    """A function that raises NotImplementedError."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} has no counterpart on a CPU; switch it off for runs with --cpu")

    return refuse


def _install_streams(cuda: Any) -> None:
    only = Stream()
    cuda.Stream = cuda.ExternalStream = Stream
    cuda.Event = Event
    for name in ("current_stream", "default_stream"):
        setattr(cuda, name, lambda *args, **kwargs: only)
    for name in ("stream", "device", "device_of"):
        setattr(cuda, name, lambda *args, **kwargs: contextlib.nullcontext())
    setattr(torch.Tensor, "record_stream", lambda self, stream: None)  # noqa: B010


def _install_generators(cuda: Any) -> None:
    """Random numbers of ``cuda`` come from the CPU's generator."""
    setattr(torch, "Generator", Generator)  # noqa: B010
    cuda.default_generators = Generators([torch.default_generator])
    generator = torch.default_generator

    def seed(value: int) -> None:
        generator.manual_seed(value)

    names: dict[str, Callable[..., Any]] = {  # each a function of its own: torch.compile has a rule for each
        "manual_seed": lambda value: seed(value),
        "manual_seed_all": lambda value: seed(value),
        "seed": lambda: seed(generator.seed()),
        "seed_all": lambda: seed(generator.seed()),
        "initial_seed": lambda: generator.initial_seed(),
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    }
    for name, value in names.items():
        setattr(cuda, name, value)
        setattr(cuda.random, name, value)


def _install_profiling(cuda: Any) -> None:
    """Ranges of NVTX and the switches of CUDA's profiler, which have no effect."""
    for module, names in {
        cuda.nvtx: ("range_push", "range_pop", "mark", "range_start", "range_end"),
        cuda.profiler: ("start", "stop", "init"),
    }.items():
        for name in names:
            setattr(module, name, lambda *args, **kwargs: None)
    cuda.nvtx.range = lambda *args, **kwargs: contextlib.nullcontext()
    cuda.cudart = lambda: SimpleNamespace(cudaProfilerStart=lambda: 0, cudaProfilerStop=lambda: 0)
