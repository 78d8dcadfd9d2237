"""Which body of an operation serves: the native one of csrc, the reference in PyTorch, or another library's."""

from __future__ import annotations

from types import ModuleType
from typing import Literal

import torch
from torch import Tensor

from megatron_core.errors import ConfigError
from megatron_core.ops import native, reference
from megatron_core.ops.libraries import apex, transformer_engine

Backend = Literal["auto", "native", "reference", "apex", "transformer_engine"]

OPS = ("activation", "cross_entropy", "dropout", "layer_norm", "multi_tensor", "rms_norm", "rope", "softmax")
"""The operations that have a native body; each names csrc/cpu/<op>.cpp, csrc/cuda/<op>.cuh and ops/<op>.py."""

LIBRARIES = {"apex": apex, "transformer_engine": transformer_engine}
"""Other libraries whose equivalents of some operations can be chosen; these files import them when they are. Each says
which operations it has (``OPS``) and for which data types (``covers``), why not where it is absent (``why_not``), and
which calls of those that it takes in part (``LIMITED``) it serves (``fits``)."""

AS_TORCH = "torch's own"
"""What serves an operation without a native body where no library does."""


def serving(op: str, wanted: Backend, device_type: str, dtype: torch.dtype) -> str:
    """The body of ``op`` that serves tensors of a kind: ``native``, ``reference`` or a library's name.

    ``auto`` takes the native body wherever there is one: benchmarks/bench_ops.py shows it to be the faster. A library
    serves the operations that it has, for the data types that it has them for, ``auto`` the others. ConfigError where
    what is asked for is absent.
    """
    if library_serves(op, wanted, device_type, dtype):
        return wanted
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


def library_serves(op: str, wanted: Backend, device_type: str, dtype: torch.dtype) -> bool:
    """Whether what is wanted is another library that has ``op`` for tensors of a kind; ConfigError where it is
    absent."""
    library = LIBRARIES.get(wanted)
    if library is None or not library.covers(op, dtype):
        return False
    obstacle = library.why_not(op, device_type, dtype)
    if obstacle is None:
        return True
    raise ConfigError(f"kernel_backend={wanted!r}: {obstacle}; or take kernel_backend='auto'")


def serving_call(op: str, wanted: Backend, x: Tensor, *deciding: object) -> str:
    """The body that serves one call of ``op`` on ``x``: ``serving``'s, but ``auto``'s where that is another library's
    and does not take a call whose arguments are the ``deciding`` ones (its ``fits`` says which and why)."""
    body = serving(op, wanted, x.device.type, x.dtype)
    if body in ("native", "reference") or LIBRARIES[body].fits(op, *deciding):
        return body
    return serving(op, "auto", x.device.type, x.dtype)


def plain(body: str) -> ModuleType:
    """The module with the functions of a body that is not native."""
    return LIBRARIES.get(body, reference)


def describe(wanted: Backend, device_type: str, dtype: torch.dtype) -> str:
    """What serves all operations, in one line, as ``native (libmegatron_cpu_avx512.so)``."""
    if wanted == "reference":
        return "reference (PyTorch), as asked for"
    served: dict[str, list[str]] = {}
    by_reference = []
    for op in [*OPS, *_further_ops(wanted, dtype)]:
        body = serving(op, wanted, device_type, dtype)
        words = _in_words(body, device_type, dtype)
        if body in LIBRARIES and op in LIBRARIES[body].LIMITED:
            body = serving(op, "auto", device_type, dtype) if op in OPS else AS_TORCH
            words = f"{words}, or for calls that it does not take {_in_words(body, device_type, dtype)},"
        served.setdefault(words, []).append(op)
        by_reference += [op] if body == "reference" else []
    if list(served) == [_in_words("native", device_type, dtype)]:
        return _in_words("native", device_type, dtype)
    said = "; ".join(f"{words} for {', '.join(ops)}" for words, ops in served.items())
    reasons = "; ".join(dict.fromkeys(str(native.why_not(op, device_type, dtype)) for op in by_reference))
    return f"{said}: {reasons}" if reasons else said


def _further_ops(wanted: Backend, dtype: torch.dtype) -> list[str]:
    """The operations that a library serves though none of them has a native body: PyTorch's own serves else."""
    library = LIBRARIES.get(wanted)
    return [] if library is None else [op for op in library.OPS if op not in OPS and library.covers(op, dtype)]


def _in_words(body: str, device_type: str, dtype: torch.dtype) -> str:
    if body == "native":
        return f"native ({native.library_path(device_type, dtype).name})"
    return {"reference": "reference (PyTorch)", "transformer_engine": "Transformer Engine"}.get(body, body)
