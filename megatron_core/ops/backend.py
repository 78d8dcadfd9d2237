"""Select the implementation of an operation: native, reference, or that of a library."""

from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import native, reference

Backend = Literal["auto", "native", "reference", "apex", "transformer_engine"]
IN_CORE = ("auto", "native", "reference")
"""The backends of this package; the others belong to features."""

OPS = ("activation", "cross_entropy", "dropout", "fp8", "layer_norm", "multi_tensor", "rms_norm", "rope", "softmax")
"""The operations with a native kernel, in csrc/cpu/<op>.cpp and csrc/cuda/<op>.cuh."""


@cache
def _library(name: str) -> Any:
    """The backend of a feature, imported on first use by the few runs that request one; ``ConfigError`` without it."""
    from megatron_core.feature import features, load_hook

    hooks = (feature.kernel_backends for feature in features() if feature.kernel_backends is not None)
    libraries = {key: library for hook in hooks for key, library in load_hook(hook).items()}
    if name not in libraries:
        raise ConfigError(f"kernel_backend={name!r}: no feature has this backend; use kernel_backend='auto'")
    return libraries[name]


def select_backend(op: str, requested: Backend, device_type: str, dtype: torch.dtype) -> str:
    """Select the backend of ``op`` for a device and data type: ``native``, ``reference`` or a library's name.

    ``auto`` selects the native kernel if available, because it is faster (benchmarks/bench_ops.py). A requested library
    is used for its operations, ``auto`` for the others. ConfigError if the requested backend is unavailable.
    """
    # A request is for the operations that the library has; others run as with auto.
    if _library_has(op, requested, device_type, dtype):
        return requested
    if requested == "reference":
        return "reference"
    reason = native.unavailable_reason(op, device_type, dtype)
    if reason is None:
        return "native"
    if requested == "native":
        raise ConfigError(
            f"kernel_backend={requested!r}: there is no native {op} for {dtype} on {device_type}: {reason}; "
            "kernel_backend='auto' uses the reference (PyTorch) instead"
        )
    return "reference"


# torch.compiler.assume_constant_result sets the same attribute, but first imports torch._dynamo, which takes 1.7 s.
vars(select_backend)["_dynamo_marked_constant"] = True


def _library_has(op: str, requested: Backend, device_type: str, dtype: torch.dtype) -> bool:
    """Whether a library is requested and has ``op``; ConfigError if it is unavailable."""
    if requested in IN_CORE or op not in (library := _library(requested)).modules:
        return False
    reason = library.unavailable_reason(op, device_type, dtype)
    if reason is None:
        return True
    raise ConfigError(f"kernel_backend={requested!r}: {reason}; or use kernel_backend='auto'")


def validate_backend(requested: Backend, device_type: str, dtype: torch.dtype) -> None:
    """ConfigError unless the requested backend can run all operations of a model in ``dtype`` and of its optimizer."""
    for op in OPS:
        select_backend(op, requested, device_type, dtype)
    # The optimizer works on weights in float32 also if the model has 16 bits.
    select_backend("multi_tensor", requested, device_type, torch.promote_types(dtype, torch.float32))


def select_backend_for(op: str, requested: Backend, x: Tensor, *arguments: object) -> str:
    """Select the backend of one call of ``op`` on ``x`` as ``select_backend`` does; ``auto`` if that backend is a
    library that does not support a call with these ``arguments``."""
    chosen = select_backend(op, requested, x.device.type, x.dtype)
    if chosen in IN_CORE or _library(chosen).supports_call(op, *arguments):
        return chosen
    return select_backend(op, "auto", x.device.type, x.dtype)


def python_backend(name: str) -> Any:
    """Return the object with the functions of a backend other than ``native``."""
    return reference if name == "reference" else _library(name)


def describe_backends(requested: Backend, device_type: str, dtype: torch.dtype) -> str:
    """Describe the backends of all operations in one line, such as ``native (libmegatron_cpu_avx2.so)``."""
    if requested == "reference":
        return "reference (PyTorch), as requested"
    ops_by_backend: dict[str, list[str]] = {}
    by_reference = []
    for op in OPS:
        chosen = select_backend(op, requested, device_type, dtype)
        label = _label(chosen, device_type, dtype)
        # Whether a call is supported depends on its arguments, so both backends are named.
        if chosen not in IN_CORE and op in _library(chosen).PARTIAL_OPS:
            chosen = select_backend(op, "auto", device_type, dtype)
            label = f"{label}, or for unsupported calls {_label(chosen, device_type, dtype)},"
        ops_by_backend.setdefault(label, []).append(op)
        by_reference += [op] if chosen == "reference" else []
    if list(ops_by_backend) == [_label("native", device_type, dtype)]:
        return _label("native", device_type, dtype)
    text = "; ".join(f"{label} for {', '.join(ops)}" for label, ops in ops_by_backend.items())
    reasons = "; ".join(dict.fromkeys(str(native.unavailable_reason(op, device_type, dtype)) for op in by_reference))
    return f"{text}: {reasons}" if reasons else text


def _label(chosen: str, device_type: str, dtype: torch.dtype) -> str:
    if chosen == "native":
        return f"native ({native.library_path(device_type, dtype).name})"
    return "reference (PyTorch)" if chosen == "reference" else str(_library(chosen).title)
