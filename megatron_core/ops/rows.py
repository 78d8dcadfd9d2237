"""Helpers of rowwise operations: tensors as rows, checks, copies, and memory for sums over rows."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_core.errors import ConfigError


def check_rows(op: str, x: Tensor, like: dict[str, Tensor | None], **parameters: Tensor) -> None:
    """ConfigError unless ``x`` is ``[..., n]``, the tensors of ``like`` have its shape, the parameters are ``[n]``, and
    all have the dtype and the device of ``x``."""
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ConfigError(f"{op}: x is {list(x.shape)}; its last dim must not be empty")
    for tensors, shape in ((like, x.shape), (parameters, x.shape[-1:])):
        for name, tensor in tensors.items():
            if tensor is None or (tensor.shape == shape and tensor.dtype == x.dtype and tensor.device == x.device):
                continue
            if tensor.shape != shape:
                wanted = f"for x {list(x.shape)} it must be {list(shape)}"
                raise ConfigError(f"{op}: {name} is {list(tensor.shape)}; {wanted}")
            of_tensor, of_x = (f"{t.dtype} on {t.device}" for t in (tensor, x))
            raise ConfigError(f"{op}: {name} is {of_tensor} and x {of_x}; both must be the same")


def count(x: Tensor) -> int:
    """Number of rows of ``[..., n]``."""
    return x.numel() // x.shape[-1]


def in_rows(x: Tensor | None) -> tuple[Tensor | None, int]:
    """``[..., n]`` as contiguous rows with a constant stride, and that stride: a view of ``x`` if its strides allow,
    else a copy; (None, 0) for None."""
    if x is None:
        return None, 0
    # Without a reshape, the most frequent case costs one test.
    if x.is_contiguous():
        return x, x.shape[-1]
    rows = contiguous_last_dim(x.reshape(-1, x.shape[-1]))
    return rows, rows.stride(0)


def contiguous_last_dim(x: Tensor) -> Tensor:
    """``x`` with a contiguous last dim; copied if necessary."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def copied_to(numbers: Iterable[Any], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Numbers of the host, or rows of them, on a device; a copy to a GPU does not block the host."""
    # Pinned memory: a copy from pageable memory waits for all work of the GPU.
    on_host = torch.tensor(list(numbers), dtype=dtype, device="cpu", pin_memory=device.type == "cuda")
    return on_host.to(device, non_blocking=True)


def new_like(x: Tensor) -> Tensor:
    """Allocate a contiguous tensor with the shape of ``x``."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums and statistics: float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def partials(x: Tensor, sums: int) -> Tensor:
    """Allocate partial sums ``[parts, sums, n]`` over the rows ``[..., n]``, which are summed in a second step.

    The number of parts depends only on the shape and the type of device, so that a sum is bitwise equal for any number
    of threads. At least 32 rows per part and at most 32 parts keep this memory small compared to the rows (64 parts
    take 10 % longer on 2048 rows). A GPU uses two to eight blocks per multiprocessor, more for shorter rows, because
    their blocks are smaller.
    """
    rows, columns = count(x), x.shape[-1]
    wanted = rows // 32
    limit = 32
    if x.device.type == "cuda":
        blocks = max(2, min(8, 16384 // columns))
        wanted = rows
        limit = blocks * torch.cuda.get_device_properties(x.device).multi_processor_count
    return x.new_empty((max(1, min(wanted, limit)), sums, columns), dtype=wide(x.dtype))
