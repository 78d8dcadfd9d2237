"""Which body of an operation serves: the native one of csrc, the reference in PyTorch, or another library's."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch

from megatron_core.errors import ConfigError
from megatron_core.ops import apex, native, reference, transformer_engine

Backend = Literal["auto", "native", "reference", "apex", "transformer_engine"]

OPS = ("activation", "cross_entropy", "dropout", "layer_norm", "multi_tensor", "rms_norm", "rope", "softmax")
"""The operations that have a native body; each names csrc/cpu/<op>.cpp, csrc/cuda/<op>.cuh and ops/<op>.py."""

LIBRARIES = {"apex": apex, "transformer_engine": transformer_engine}
"""Other libraries whose equivalents of some operations can be chosen; these files import them when they are."""


def serving(op: str, wanted: Backend, device_type: str, dtype: torch.dtype) -> str:
    """The body of ``op`` that serves tensors of a kind: ``native``, ``reference`` or a library's name.

    ``auto`` takes the native body wherever there is one: benchmarks/bench_ops.py shows it to be the faster. A library
    serves the operations that it has, ``auto`` the others. ConfigError where what is asked for is absent.
    """
    library = LIBRARIES.get(wanted)
    if library is not None and op in library.OPS:
        obstacle = library.why_not(device_type, dtype)
        if obstacle is None:
            return wanted
        raise ConfigError(f"kernel_backend={wanted!r}: {obstacle}; or take kernel_backend='auto'")
    if wanted == "reference":
        return "reference"
    obstacle = native.why_not(op, device_type, dtype)
    if obstacle is None:
        return "native"
    if wanted == "native":
        raise ConfigError(
            f"kernel_backend={wanted!r}: there is no native {op} for {dtype} on {device_type}: {obstacle}; "
            "kernel_backend='auto' takes PyTorch's own instead"
        )
    return "reference"


# torch.compiler.assume_constant_result sets this too, but imports torch._dynamo for it, which takes 1.7 seconds.
serving._dynamo_marked_constant = True


def plain(body: str) -> ModuleType:
    """The module with the functions of a body that is not native."""
    return LIBRARIES.get(body, reference)


def describe(wanted: Backend, device_type: str, dtype: torch.dtype) -> str:
    """What serves all operations, in one line, as ``native (libmegatron_cpu_avx512.so)``."""
    if wanted == "reference":
        return "reference (PyTorch), as asked for"
    served: dict[str, list[str]] = {}
    for op in OPS:
        served.setdefault(serving(op, wanted, device_type, dtype), []).append(op)
    if list(served) == ["native"]:
        return _in_words("native", device_type)
    parts = [f"{_in_words(body, device_type)} for {', '.join(ops)}" for body, ops in served.items()]
    reasons = dict.fromkeys(native.why_not(op, device_type, dtype) for op in served.get("reference", []))
    return ": ".join(["; ".join(parts), *(["; ".join(map(str, reasons))] if reasons else [])])


def _in_words(body: str, device_type: str) -> str:
    named = {"reference": "reference (PyTorch)", "transformer_engine": "Transformer Engine"}
    return f"native ({native.library_path(device_type).name})" if body == "native" else named.get(body, body)
