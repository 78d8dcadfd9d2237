"""The native libraries: location, availability, and calls through ctypes."""

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import NoneType
from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import ConfigError

FOLDER = Path(__file__).with_name("lib")
"""Output folder of the build."""

INTERFACE = 14
"""The version of csrc/common/interface.h that this file calls."""

DTYPES: dict[Any, int] = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""Numbers of the dtypes in csrc/common/interface.h."""

LEVELS = {"AVX2": ("avx2",), "AVX512": ("avx512", "avx2")}
"""Libraries for the vector instructions of a CPU, by their name in torch; the first is the fastest."""

Value = Tensor | ctypes.Array | torch.dtype | int | float | None
"""Argument of a native function: memory, a number, or the number of a dtype; None is an absent tensor."""


def library_path(device_type: str, dtype: torch.dtype) -> Path:
    """Path of the library for a device and dtype. A CPU with AVX-512 or AVX2 uses the library for it, except for
    float64: these libraries have no float64, which is meant for verification, not for speed."""
    if device_type != "cpu":
        return FOLDER / f"libmegatron_{device_type}.so"
    # torch's own choice, which also follows ATEN_CPU_CAPABILITY.
    levels = LEVELS.get(torch.backends.cpu.get_cpu_capability(), ()) if dtype != torch.float64 else ()
    paths = [FOLDER / f"libmegatron_cpu_{level}.so" for level in (*levels, "default")]
    return next((path for path in paths if path.exists()), paths[-1])


@cache
def library(device_type: str, dtype: torch.dtype) -> ctypes.CDLL:
    """Load the library for tensors on ``cpu`` or ``cuda``; ConfigError if it is missing or outdated, with the fix."""
    path = library_path(device_type, dtype)
    if not path.exists():
        needs = "a C++ compiler (GCC or Clang)" + (" and nvcc" if device_type == "cuda" else "")
        raise ConfigError(f"{path} was not built; install {needs}, then run pip install . (or -e .) again")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"{path} cannot be loaded: {error}; run pip install . (or -e .) again") from None
    # A library of another version would read arguments at wrong places instead of failing.
    version = loaded.megatron_interface() if hasattr(loaded, "megatron_interface") else 0
    if version != INTERFACE:
        raise ConfigError(
            f"{path} has interface version {version}, but {INTERFACE} is needed; run pip install . (or -e .) again"
        )
    return loaded


@cache
def unavailable_reason(op: str, device_type: str, dtype: torch.dtype) -> str | None:
    """Why there is no native kernel of ``op`` for a device and dtype; None if there is one."""
    if device_type not in ("cpu", "cuda"):
        return f"native kernels run on cpu and cuda, not on {device_type}"
    if device_type == "cuda" and not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        library(device_type, dtype)
    except ConfigError as error:
        return str(error)
    if dtype not in DTYPES or (device_type == "cuda" and dtype == torch.float64):
        return f"it is not built for {dtype} on {device_type}"
    return _gpu_obstacle(dtype) if device_type == "cuda" else None


def _gpu_obstacle(dtype: torch.dtype) -> str | None:
    """Why the current GPU cannot run the library's kernels; None if it can."""
    # The kernels use bfloat16 arithmetic, which begins with this generation.
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than compute capability 8.0, for which it is built"
    entry = library("cuda", dtype).megatron_obstacle
    entry.restype = ctypes.c_char_p
    obstacle = entry()
    if obstacle is None:
        return None
    name = torch.cuda.get_device_name()
    return f"its kernels do not run on {name}: {obstacle.decode()}; update the driver, or build it with an older CUDA"


def architecture(device_type: str, dtype: torch.dtype) -> str:
    """The target architecture of the library for tensors on ``cpu`` or ``cuda``, such as ``avx2`` or ``sm_80 sm_90a and
    PTX of compute_80``."""
    if device_type == "cpu":
        return library_path(device_type, dtype).stem.rpartition("_")[2]
    entry = library(device_type, dtype).megatron_architectures
    entry.restype = ctypes.c_char_p
    return entry().decode()


def fixed_kernel(dtype: torch.dtype) -> str:
    """The kernel of matrix products in a fixed order for tensors on the CPU in float32 or bfloat16: ``vectors``,
    ``avx512`` or ``amx`` (csrc/common/fixed_products.h)."""
    entry = library("cpu", dtype).megatron_fixed_kernel
    entry.argtypes = (ctypes.c_int64,)
    entry.restype = ctypes.c_char_p
    return entry(DTYPES[dtype]).decode()


def call(function: str, of: Tensor, *values: Value) -> None:
    """Run ``megatron_<function>`` for the dtype and device of ``of``, with torch's number of threads or on its stream.

    The function's first argument is the dtype, ``values`` are the others; all tensors must be on the same device.
    """
    dtype = of.dtype
    device_type = "cpu" if of.is_cpu else of.device.type
    # ctypes converts by the prototype: a Python float must arrive as a double and an int as an int64, on every
    # platform.
    entry, tensors, dtypes = _entry(library(device_type, dtype), function, tuple(map(type, values)))
    # By index, because a small kernel takes less time than a test of the type of each argument.
    arguments: list[Any] = list(values)
    for index in tensors:
        arguments[index] = arguments[index].data_ptr()
    for index in dtypes:
        arguments[index] = DTYPES[arguments[index]]
    if device_type == "cuda":
        # A launch goes to the current device of the thread, which need not be that of the tensors.
        with torch.cuda.device(of.device):
            error = entry(DTYPES[dtype], *arguments, 1, torch.cuda.current_stream(of.device).cuda_stream)
    else:
        # C++ exceptions must not pass through ctypes, so a function returns its message.
        error = entry(DTYPES[dtype], *arguments, torch.get_num_threads(), None)
    if error is not None:
        raise RuntimeError(f"{function} on {of.device}: {error.decode()}")


@cache
def _entry(
    library: ctypes.CDLL, function: str, types: tuple[type, ...]
) -> tuple[Callable[..., bytes | None], list[int], list[int]]:
    """The C function with a separate prototype for each tuple of argument types, and the indices of the arguments that
    are tensors and dtypes."""
    # Cached, because building a prototype takes longer than a small kernel. A separate one for each tuple of types,
    # because ``argtypes`` of a shared function would change for all callers.
    kinds = (ctypes.c_int64, *map(_kind, types), ctypes.c_int64, ctypes.c_void_p)
    tensors, dtypes = (
        [index for index, kind in enumerate(types) if issubclass(kind, wanted)] for wanted in (Tensor, torch.dtype)
    )
    return ctypes.CFUNCTYPE(ctypes.c_char_p, *kinds)((f"megatron_{function}", library)), tensors, dtypes


def _kind(value: type) -> type:
    """The C type of an argument: memory is a pointer, numbers are int64 or double."""
    if value is NoneType or issubclass(value, Tensor | ctypes.Array):
        return ctypes.c_void_p
    return ctypes.c_double if issubclass(value, float) else ctypes.c_int64
