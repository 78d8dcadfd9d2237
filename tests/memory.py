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


def start_anew() -> None:
    """Return memory freed by earlier tests, which would otherwise be reused without growth, and reset the peak."""
    give_back()
    Path("/proc/self/clear_refs").write_text("5")
