"""What operations on rows share: tensors as rows, their checks, and room for sums over rows."""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_core.errors import ConfigError


def check(op: str, x: Tensor, like: dict[str, Tensor | None], **parameters: Tensor) -> None:
    """``x`` is ``[..., n]``, those of ``like`` have its shape, each parameter is ``[n]``; all of one dtype, on one
    device."""
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ConfigError(f"{op}: x is {list(x.shape)}; its last dim has to have elements")
    for tensors, shape in ((like, x.shape), (parameters, x.shape[-1:])):
        for name, tensor in tensors.items():
            if tensor is None or (tensor.shape == shape and tensor.dtype == x.dtype and tensor.device == x.device):
                continue
            if tensor.shape != shape:
                wanted = f"for x {list(x.shape)} it has to be {list(shape)}"
                raise ConfigError(f"{op}: {name} is {list(tensor.shape)}; {wanted}")
            there, here = (f"{t.dtype} on {t.device}" for t in (tensor, x))
            raise ConfigError(f"{op}: {name} is {there} and x {here}; both have to be the same")


def as_rows(x: Tensor) -> Tensor:
    """``[..., n]`` as ``[rows, n]`` whose rows are contiguous: a view where strides allow it, else a copy."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def new_like(x: Tensor) -> Tensor:
    """New memory for a contiguous tensor of the shape of ``x``."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of sums and statistics: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def statistics(x: Tensor) -> Tensor:
    """New memory for one number for each row of ``x``."""
    return x.new_empty(x.shape[:-1], dtype=wide(x.dtype))


def partials(rows: Tensor, sums: int) -> Tensor:
    """New memory ``[parts, sums, n]`` in which parts of the rows ``[rows, n]`` are added up before they are joined.

    Their number follows from the shape and the kind of device alone, so that threads do not change a sum's bits: at
    least 32 rows a part keep this memory small beside the rows; a GPU takes two to eight blocks a multiprocessor, the
    more the shorter the rows and so the blocks are.
    """
    count = len(rows) // 32
    limit = 64
    if rows.device.type == "cuda":
        blocks = max(2, min(8, 16384 // rows.shape[1]))
        count, limit = len(rows), blocks * torch.cuda.get_device_properties(rows.device).multi_processor_count
    return rows.new_empty((max(1, min(count, limit)), sums, rows.shape[1]), dtype=wide(rows.dtype))
