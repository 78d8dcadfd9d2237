"""``torch.cuda`` as a description of the CPU, for programs that run with ``--cpu``."""

import contextlib
import copy
import importlib
import inspect
import os
import sys
from collections import defaultdict
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn

import torch

from megatron_core.drop_in import cuda_streams
from megatron_core.drop_in.cuda_calls import CPU, in_program
from megatron_core.text_file import read_table

_TABLES = read_table(__file__)
CONSTANTS: dict[str, Any] = {
    name: tuple(value) if isinstance(value, list) and value else value for name, value in _TABLES["constants"].items()
}
CONSTANTS |= {"memory_stats": defaultdict(int), "host_memory_stats": defaultdict(int)}
"""Values that functions of ``torch.cuda`` return."""
WITHOUT_EFFECT = _TABLES["without_effect"].split()
NOT_ON_A_CPU = _TABLES["not_on_a_cpu"].split()
CLASSES_NOT_ON_A_CPU = _TABLES["classes_not_on_a_cpu"].split()
ELEMENTS = ("Float", "Double", "Half", "BFloat16", "Long", "Int", "Short", "Char", "Byte", "Bool")
ELEMENTS_OF_STORAGE = (*ELEMENTS, "ComplexFloat", "ComplexDouble")
"""Names of the classes ``torch.cuda.FloatTensor`` and ``torch.cuda.FloatStorage``, which are those of the CPU."""


class AnyGenerator(type(torch._C.Generator)):  # type: ignore[misc]
    """Lets ``isinstance`` and ``issubclass`` accept the generators that torch makes itself."""

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, torch._C.Generator) if cls is Generator else super().__subclasscheck__(subclass)


class Generator(torch._C.Generator, metaclass=AnyGenerator):
    """A generator of the CPU, whichever device it is asked for."""

    def __new__(cls, device: Any = None) -> "Generator":
        return super().__new__(cls)


class Generators(tuple[torch.Generator, ...]):
    """The CPU's generator as that of each device."""

    def __getitem__(self, index: Any) -> Any:
        return torch.default_generator


class Runtime(SimpleNamespace):
    """CUDA's runtime library, of which functions for profilers and pinned memory succeed without effect."""

    def __getattr__(self, name: str) -> Any:
        return refusal(f"torch.cuda.cudart().{name}")


RUNTIME = Runtime(
    cudaError=SimpleNamespace(success=0),
    **dict.fromkeys(
        ("cudaProfilerStart", "cudaProfilerStop", "cudaHostRegister", "cudaHostUnregister"), lambda *args: 0
    ),
)


def install(devices: int) -> None:
    """Replace the functions and classes of ``torch.cuda`` in this process; it describes ``devices`` devices."""
    names = {
        **{name: _constant(value) for name, value in CONSTANTS.items()},
        **{name: _constant(None) for name in WITHOUT_EFFECT},
        **{name: refusal(f"torch.cuda.{name}") for name in NOT_ON_A_CPU},
        **_classes(),
        **_devices(devices),
        **_streams(),
        **_generators(),
        "nvtx.range": lambda *args, **kwargs: contextlib.nullcontext(),
        "cudart": lambda: RUNTIME,
    }
    replace(torch.cuda, names)
    setattr(torch.Tensor, "record_stream", lambda self, stream: None)  # noqa: B010
    setattr(torch, "Generator", Generator)  # noqa: B010
    setattr(torch.cuda, "default_generators", Generators([torch.default_generator]))  # noqa: B010
    cuda_streams.complete_cpu_streams()
    _install_accelerator()


def replace(package: ModuleType, names: dict[str, Any]) -> None:
    """Set ``names`` (in ``package`` or, as ``module.name``, in a module of it) wherever the package binds the original.

    Names that this version of torch does not have are left out.
    """
    replaced: dict[int, Any] = {}
    for path, value in names.items():
        *inner, name = path.split(".")
        module = _module(package, inner)
        if module is not None and hasattr(module, name):
            original = getattr(module, name)
            replaced[id(original)] = original, value
            setattr(module, name, value)
    homes = [module for name, module in sys.modules.items() if f"{name}.".startswith(f"{package.__name__}.")]
    for module in homes:
        for name, value in list(vars(module).items()):
            original, replacement = replaced.get(id(value), (None, None))
            if original is value and (inspect.isroutine(value) or inspect.isclass(value)):
                setattr(module, name, replacement)


def _module(package: ModuleType, inner: list[str]) -> ModuleType | None:
    if not inner:
        return package
    try:
        return importlib.import_module(f"{package.__name__}.{inner[0]}")
    except ImportError:
        return None


def _constant(value: Any) -> Callable[..., Any]:
    """A function of any arguments that returns ``value``; a copy, which the caller may change."""
    return lambda *args, **kwargs: copy.copy(value)


def refusal(name: str) -> Callable[..., NoReturn]:
    """A function that raises NotImplementedError."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise NotImplementedError(f"{name} has no counterpart on a CPU; switch it off for runs with --cpu")

    return refuse


def _classes() -> dict[str, type]:
    """Classes without a counterpart, and those of tensors and storages."""
    classes: dict[str, type] = {}
    for path in CLASSES_NOT_ON_A_CPU:
        *inner, name = path.split(".")
        original = getattr(_module(torch.cuda, inner), name, None)
        if original is not None:
            refuse = refusal(f"torch.cuda.{path}")
            members = {"__new__": refuse, "__init__": refuse, "__module__": original.__module__}
            classes[path] = type(original)(name, (original,), members)
    for name in ELEMENTS:
        classes[f"{name}Tensor"] = getattr(torch, f"{name}Tensor")
        if hasattr(torch.sparse, f"{name}Tensor"):
            classes[f"sparse.{name}Tensor"] = getattr(torch.sparse, f"{name}Tensor")
    return classes | {f"{name}Storage": getattr(torch, f"{name}Storage") for name in ELEMENTS_OF_STORAGE}


def _devices(devices: int) -> dict[str, Any]:
    """The number and the properties of devices."""
    real = torch.cuda.get_device_properties

    def get_device_properties(*args: Any, **kwargs: Any) -> Any:
        if not in_program(sys._getframe(1).f_code.co_filename):
            return real(*args, **kwargs)  # an error, after which libraries use their code for CPUs
        memory = host_memory("SC_PHYS_PAGES")
        return SimpleNamespace(name="CPU", major=0, minor=0, total_memory=memory, multi_processor_count=os.cpu_count())

    return {
        "device_count": lambda: devices,
        "is_available": lambda: in_program(sys._getframe(1).f_code.co_filename),
        "is_initialized": lambda: in_program(sys._getframe(1).f_code.co_filename),
        "get_device_properties": get_device_properties,
        "mem_get_info": lambda *args, **kwargs: (host_memory("SC_AVPHYS_PAGES"), host_memory("SC_PHYS_PAGES")),
        "device": cuda_streams.device,
        "device_of": cuda_streams.device_of,
    }


def host_memory(pages: str) -> int:
    """Bytes of the host's memory: ``pages`` is a name of ``os.sysconf``."""
    return os.sysconf(pages) * os.sysconf("SC_PAGE_SIZE")


def _streams() -> dict[str, Any]:
    names = ("Event", "Stream", "ExternalStream", "StreamContext", "stream", "set_stream", "current_stream")
    streams = {name: getattr(cuda_streams, name) for name in (*names, "default_stream")}
    return streams | {"get_stream_from_external": lambda pointer, device=None: cuda_streams.ExternalStream(pointer)}


def _generators() -> dict[str, Callable[..., Any]]:
    """Random numbers of ``cuda`` come from the CPU's generator."""
    generator = torch.default_generator

    def seed(value: int) -> None:
        generator.manual_seed(value)

    return {  # each a function of its own: torch.compile has a rule for each
        "manual_seed": lambda seed_: seed(seed_),
        "manual_seed_all": lambda seed_: seed(seed_),
        "seed": lambda: seed(generator.seed()),
        "seed_all": lambda: seed(generator.seed()),
        "initial_seed": lambda: generator.initial_seed(),
        "get_rng_state": lambda *args, **kwargs: torch.get_rng_state(),
        "set_rng_state": lambda state, *args, **kwargs: torch.set_rng_state(state),
        "get_rng_state_all": lambda: [torch.get_rng_state()],
        "set_rng_state_all": lambda states: torch.set_rng_state(states[0]),
    }


def _install_accelerator() -> None:
    """Describe the CPU by ``torch.accelerator``, too: programs use it in place of ``torch.cuda``."""
    real = torch.accelerator.current_accelerator
    cuda = torch.cuda
    same_names = (
        *("device_count", "is_available", "current_stream", "set_stream", "synchronize", "empty_cache"),
        *("get_device_capability", "memory_stats", "memory_allocated", "max_memory_allocated", "memory_reserved"),
        *("max_memory_reserved", "reset_peak_memory_stats", "reset_accumulated_memory_stats"),
    )
    names: dict[str, Any] = {name: getattr(cuda, name) for name in same_names}

    def current_accelerator(check_available: bool = False) -> torch.device | None:
        return CPU if in_program(sys._getframe(1).f_code.co_filename) else real(check_available)

    names |= dict.fromkeys(("current_device_index", "current_device_idx"), cuda.current_device)
    names |= dict.fromkeys(("set_device_index", "set_device_idx"), cuda.set_device)
    names |= {"current_accelerator": current_accelerator, "device_index": cuda_streams.device}
    names |= {"get_memory_info": cuda.mem_get_info, "empty_host_cache": _constant(None)}
    replace(torch.accelerator, names)
    # ``torch.random.fork_rng`` takes ``torch.cpu`` for the module of the device.
    vars(torch.cpu).update({name: getattr(cuda, name) for name in ("get_rng_state", "set_rng_state")})
