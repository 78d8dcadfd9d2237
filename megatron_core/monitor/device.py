"""Memory of this rank's device."""

import os
import resource
import sys
from pathlib import Path

import torch


def peak_memory_bytes() -> int:
    """Peak bytes so far: of the tensors of the current GPU if CUDA is in use, otherwise of the process."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.max_memory_allocated()
    # Torch does not count memory of the CPU, so this is that of the process with its libraries.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024  # Linux counts kibibytes, macOS bytes


def current_memory_bytes() -> int:
    """Current bytes, as ``peak_memory_bytes``; the peak if the system does not report the current size."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.memory_allocated()
    counts = Path("/proc/self/statm")
    if not counts.exists():
        return peak_memory_bytes()
    return int(counts.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def total_memory_bytes() -> int:
    """Bytes of this rank's device, on a CPU shared by all ranks of the host; 0 if unknown."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    if "SC_PHYS_PAGES" not in os.sysconf_names:
        return 0
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
