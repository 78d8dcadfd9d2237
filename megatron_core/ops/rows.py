"""What operations on rows share: tensors as rows, their checks, and room for sums over rows."""

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


def count(x: Tensor) -> int:
    """The rows of ``[..., n]``."""
    return x.numel() // x.shape[-1]


def in_rows(x: Tensor | None) -> tuple[Tensor | None, int]:
    """``[..., n]`` with contiguous rows that lie equally far apart, and how far: ``x`` where its strides are so, else a
    copy; (None, 0) for None."""
    if x is None:
        return None, 0
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = x.reshape(-1, x.shape[-1])
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    return rows, rows.stride(0)


def new_like(x: Tensor) -> Tensor:
    """New memory for a contiguous tensor of the shape of ``x``."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The precision of sums and statistics: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def partials(x: Tensor, sums: int) -> Tensor:
    """New memory ``[parts, sums, n]`` in which parts of the rows ``[..., n]`` are added up before they are joined.

    Their number follows from the shape and the kind of device alone, so that threads do not change a sum's bits: at
    least 32 rows a part keep this memory small beside the rows, and so do 32 parts at most (64 take a tenth longer on
    2048 rows); a GPU takes two to eight blocks a multiprocessor, the more the shorter the rows and so the blocks are.
    """
    rows, columns = count(x), x.shape[-1]
    wanted, limit = rows // 32, 32
    if x.device.type == "cuda":
        blocks = max(2, min(8, 16384 // columns))
        wanted, limit = rows, blocks * torch.cuda.get_device_properties(x.device).multi_processor_count
    return x.new_empty((max(1, min(wanted, limit)), sums, columns), dtype=wide(x.dtype))
