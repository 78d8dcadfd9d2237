"""Memory of this rank, now and at its peak."""

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


def total_memory_bytes() -> int:
    """Bytes that this rank's device has, which on a CPU all ranks of the host share; 0 if that is unknown."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
