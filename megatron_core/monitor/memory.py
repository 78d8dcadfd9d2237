"""Peak memory of this rank."""

from __future__ import annotations

import resource
import sys

import torch


def peak_memory_bytes() -> int:
    """Peak bytes so far: of the current GPU's tensors where CUDA is in use, else of the whole process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kibibytes, macOS bytes
