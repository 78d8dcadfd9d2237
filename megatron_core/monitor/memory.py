"""Memory of this rank, now and at its peak."""

from __future__ import annotations

import os
import resource
import sys
from pathlib import Path

import torch


def peak_memory_bytes() -> int:
    """Peak bytes so far: of the current GPU's tensors where CUDA is in use, else of the whole process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kibibytes, macOS bytes


def current_memory_bytes() -> int:
    """Bytes now: as ``peak_memory_bytes``; where the system does not tell of a process, its peak."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    counts = Path("/proc/self/statm")
    if not counts.exists():
        return peak_memory_bytes()
    return int(counts.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
