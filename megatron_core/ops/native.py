"""The native libraries: where they are, whether they load, and calls into them through ctypes."""

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
"""Where the build puts the libraries."""

INTERFACE = 7
"""The version of csrc/common/interface.h that this file calls."""

DTYPES: dict[Any, int] = {torch.float32: 0, torch.float64: 1, torch.bfloat16: 2, torch.float16: 3}
"""The numbers of csrc/common/interface.h."""

Value = Tensor | torch.dtype | int | float | None
"""What a native function takes; None is a tensor that is absent."""


def library_path(device_type: str, dtype: torch.dtype) -> Path:
    """The library for tensors of a kind: for a CPU with AVX2 the one that uses it, but for float64, which is for
    verification and not for speed, the one for any processor: the other has no float64."""
    if device_type != "cpu":
        return FOLDER / f"libmegatron_{device_type}.so"
    avx2, default = (FOLDER / f"libmegatron_cpu_{level}.so" for level in ("avx2", "default"))
    fits = torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    return avx2 if fits and dtype != torch.float64 and avx2.exists() else default


@cache
def library(device_type: str, dtype: torch.dtype) -> ctypes.CDLL:
    """The loaded library for tensors on ``cpu`` or ``cuda``; ConfigError says what is missing and how to get it."""
    path = library_path(device_type, dtype)
    if not path.exists():
        needs = "a C++ compiler (GCC or Clang)" + (" and nvcc" if device_type == "cuda" else "")
        raise ConfigError(f"{path} was not built; install {needs}, then run pip install . (or -e .) again")
    try:
        loaded = ctypes.CDLL(str(path))
    except OSError as error:
        raise ConfigError(f"{path} does not load: {error}; run pip install . (or -e .) again") from None
    version = loaded.megatron_interface() if hasattr(loaded, "megatron_interface") else 0
    if version != INTERFACE:
        raise ConfigError(f"{path} has interface {version}, this code {INTERFACE}; run pip install . (or -e .) again")
    return loaded


@cache
def unavailable_reason(op: str, device_type: str, dtype: torch.dtype) -> str | None:
    """Why there is no native kernel of ``op`` for tensors of a kind; None if there is one."""
    if device_type not in ("cpu", "cuda"):
        return f"native kernels are for cpu and cuda, not {device_type}"
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
    """What the library for tensors on ``cpu`` or ``cuda`` was compiled for, as ``avx2`` or ``sm_80 sm_90a and PTX of
    compute_80``."""
    if device_type == "cpu":
        return library_path(device_type, dtype).stem.rpartition("_")[2]
    entry = library(device_type, dtype).megatron_architectures
    entry.restype = ctypes.c_char_p
    return entry().decode()


def call(function: str, of: Tensor, *values: Value) -> None:
    """Run ``megatron_<function>`` for the dtype of a tensor on its device, with torch's threads, on torch's stream.

    The function's first argument is that dtype, ``values`` are the others; all tensors are on the same device.
    """
    device, values = of.device, (of.dtype, *values)
    plain = [value.data_ptr() if isinstance(value, Tensor) else DTYPES.get(value, value) for value in values]
    entry = _entry(library(device.type, of.dtype), function, tuple(map(type, values)))
    if device.type == "cuda":
        with torch.cuda.device(device):
            error = entry(*plain, 1, torch.cuda.current_stream(device).cuda_stream)
    else:
        error = entry(*plain, torch.get_num_threads(), None)
    if error is not None:
        raise RuntimeError(f"{function} on {device}: {error.decode()}")


@cache
def _entry(library: ctypes.CDLL, function: str, types: tuple[type, ...]) -> Callable[..., bytes | None]:
    """The C function; a prototype of its own for each tuple of types, so that none changes another's."""
    prototype = ctypes.CFUNCTYPE(ctypes.c_char_p, *map(_kind, types), ctypes.c_int64, ctypes.c_void_p)
    return prototype((f"megatron_{function}", library))


def _kind(value: type) -> type:
    """Tensors go as pointers, other numbers as int64 or double: the interface has nothing else."""
    if value is NoneType or issubclass(value, Tensor):
        return ctypes.c_void_p
    return ctypes.c_double if issubclass(value, float) else ctypes.c_int64
