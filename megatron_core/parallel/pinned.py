"""Pinned host memory of any size, for large buffers that live long."""

import weakref

import numpy as np
import torch
from torch import Tensor

PAGE = 4096
REGISTERED_FROM = 2**20
"""Bytes from which memory is registered; smaller sizes come from torch, which keeps them for reuse."""


def pinned_bytes(size: int) -> Tensor:
    """Allocate ``size`` zero bytes of pinned host memory, a uint8 tensor.

    torch's allocator rounds sizes up to powers of two: up to twice, and on average 1.4 times, the state of a model.
    Memory is therefore allocated in whole pages and registered. Unlike torch's own it may not be freed while a stream
    copies it. Errors: ``RuntimeError`` if the system does not lock that many pages (``ulimit -l``).
    """
    if size < REGISTERED_FROM:
        return torch.zeros(size, dtype=torch.uint8, pin_memory=True)
    length = -(-size // PAGE) * PAGE
    owner = np.zeros(length + PAGE, np.uint8)
    offset = -owner.ctypes.data % PAGE
    address = owner.ctypes.data + offset
    runtime = torch.cuda.cudart()
    torch.cuda.check_error(runtime.cudaHostRegister(address, length, 0))
    # Not at the end of the process, when the driver may be gone.
    weakref.finalize(owner, runtime.cudaHostUnregister, address).atexit = False
    return torch.from_numpy(owner[offset : offset + length])[:size]


def pinned_like(tensor: Tensor) -> Tensor:
    """Allocate pinned host memory for a contiguous tensor; see ``pinned_bytes``."""
    return pinned_bytes(tensor.nbytes).view(tensor.dtype).view(tensor.shape)
