"""Resident memory of this process, from /proc."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest

needs_proc = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="memory is read from /proc")


def resident(field: str) -> int:
    """Memory of this process in bytes: VmRSS now, VmHWM at its peak."""
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.split(f"{field}:")[1].split()[0])


def give_back() -> None:
    """Give freed memory back to the system."""
    ctypes.CDLL(None).malloc_trim(0)


MMAP_THRESHOLD = -3
"""M_MMAP_THRESHOLD of glibc's malloc.h."""


def start_anew() -> None:
    """Return memory freed by earlier tests, which would otherwise be reused without growth, and reset the peak.

    From now on blocks of 128 kB are mapped, and returned when they are freed. By itself malloc raises this threshold to
    the largest block freed before, so that the peak would depend on earlier tests of this process.
    """
    ctypes.CDLL(None).mallopt(MMAP_THRESHOLD, 128 * 1024)
    give_back()
    Path("/proc/self/clear_refs").write_text("5")
