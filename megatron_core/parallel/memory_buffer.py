"""Memory that is reused under a name."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from math import prod

import torch
from torch import Tensor


class GlobalMemoryBuffer:
    """Tensors by name and dtype, whose memory is allocated once and grows; not for two uses of a name at a time."""

    def __init__(self) -> None:
        self.buffer: dict[tuple[str, torch.dtype], Tensor] = {}

    def get_tensor(
        self,
        tensor_shape: Sequence[int],
        dtype: torch.dtype,
        name: str,
        mem_alloc_context: Callable[[], AbstractContextManager[object]] | None = None,
    ) -> Tensor:
        """A tensor of this shape at the beginning of the memory of ``name``, on the current GPU if there is one."""
        size, key = prod(tensor_shape), (name, dtype)
        if key not in self.buffer or self.buffer[key].numel() < size:
            with (mem_alloc_context or nullcontext)():
                self.buffer[key] = torch.empty(size, dtype=dtype, device="cuda" if torch.cuda.is_available() else "cpu")
        return self.buffer[key][:size].view(*tensor_shape)
