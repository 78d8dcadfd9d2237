"""csrc/cpu/transport compiled for a test, unchanged or with a changed fragment."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from megatron_core.cpu_ranks.shared_memory import host

CSRC = Path(__file__).parents[3] / "csrc"
SOURCES = CSRC / "cpu" / "transport"


def compiled(folder: Path, file: str = "", old: str = "", new: str = "") -> Path:
    """A folder with the library; ``old``, which must occur exactly once in ``file``, is replaced by ``new``."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (c++, g++ or clang++) to compile csrc with")
    copy = folder / "cpu" / "transport"
    shutil.copytree(SOURCES, copy)
    if file:
        source = (copy / file).read_text()
        assert source.count(old) == 1, f"{file} has {source.count(old)} times, not once: {old}"
        (copy / file).write_text(source.replace(old, new))
    command = [compiler, "-std=c++17", "-O1", "-fPIC", "-shared", "-Wno-psabi", f"-I{folder}", f"-I{CSRC}"]
    target = folder / "libmegatron_transport_default.so"
    subprocess.run([*command, copy / "transport.cpp", "-o", target], check=True, timeout=120)
    return folder


@contextmanager
def in_use(folder: Path) -> Iterator[None]:
    """Make ranks forked in this context load the library of ``folder``."""
    before = host.FOLDER
    host.FOLDER = folder
    host.shared_memory_library.cache_clear()
    try:
        yield
    finally:
        host.FOLDER = before
        host.shared_memory_library.cache_clear()
