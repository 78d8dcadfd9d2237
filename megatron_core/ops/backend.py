"""Which body of an operation serves: the native one of csrc, or the reference in PyTorch."""

from __future__ import annotations

from typing import Literal

import torch

from megatron_core.errors import ConfigError
from megatron_core.ops import native

Backend = Literal["auto", "native", "reference"]

OPS = ("layer_norm", "rms_norm")
"""The operations that have a native body; each names csrc/cpu/<op>.cpp, csrc/cuda/<op>.cuh and ops/<op>.py."""


@torch.compiler.assume_constant_result
def serving(op: str, wanted: Backend, device_type: str, dtype: torch.dtype) -> Literal["native", "reference"]:
    """The body of ``op`` that serves tensors of a kind; ConfigError where ``native`` is asked for and absent.

    ``auto`` takes the native body wherever there is one: benchmarks/bench_ops.py shows it to be the faster.
    """
    if wanted == "reference":
        return "reference"
    obstacle = native.why_not(op, device_type, dtype)
    if obstacle is None:
        return "native"
    if wanted == "auto":
        return "reference"
    raise ConfigError(
        f"kernel_backend={wanted!r}: there is no native {op} for {dtype} on {device_type}: {obstacle}; "
        "kernel_backend='auto' takes PyTorch's own instead"
    )


def describe(wanted: Backend, device_type: str, dtype: torch.dtype) -> str:
    """What serves all operations, in one line, as ``native (libmegatron_cpu_avx512.so)``."""
    obstacles = {op: native.why_not(op, device_type, dtype) for op in OPS}
    if wanted == "reference":
        return "reference (PyTorch), as asked for"
    if not any(obstacles.values()):
        return f"native ({native.library_path(device_type).name})"
    reasons = dict.fromkeys(reason for reason in obstacles.values() if reason)
    absent = ", ".join(op for op, reason in obstacles.items() if reason)
    return f"reference (PyTorch) for {absent}: {'; '.join(reasons)}"
