"""Native libraries for tests: installed ones, or compiled here; and the CUDA sources on the CPU."""

from __future__ import annotations

import ctypes
import fcntl
import hashlib
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
import torch

from megatron_core.ops import native

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
HOST_CUDA = (*sorted((CSRC / "cuda").glob("*.cu")), CSRC / "host_cuda" / "fibers.cpp")
FLAGS = ["-std=c++17", "-O1", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi", f"-I{CSRC}"]
PARTS = ("common", "cpu", "cuda", "host_cuda")
COMPILERS = 2
COMPILED = ROOT / "build" / "test_libraries"
"""Libraries by a hash of their sources; ``make clean`` removes them."""


@cache
def compiled(*sources: Path) -> ctypes.CDLL:
    """A library of these sources, compiled once for all processes; skips the test without a C++ compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (c++, g++ or clang++) to compile csrc with")
    made_of = hashlib.sha256(" ".join([compiler, *FLAGS, *map(str, sources)]).encode())
    for path in sorted(path for part in PARTS for path in (CSRC / part).rglob("*.*")):
        made_of.update(path.read_bytes())
    COMPILED.mkdir(parents=True, exist_ok=True)
    library = COMPILED / f"{made_of.hexdigest()[:16]}.so"
    with (COMPILED / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another process of the same test run is compiling it
        if not library.exists():
            _compile(compiler, sources, library)
    return ctypes.CDLL(str(library))


def _compile(compiler: str, sources: tuple[Path, ...], library: Path) -> None:
    with TemporaryDirectory(dir=COMPILED) as folder:

        def compile_source(source: Path) -> str:
            compiled_to = f"{folder}/{source.name}.o"
            subprocess.run([compiler, *FLAGS, "-x", "c++", "-c", source, "-o", compiled_to], check=True, timeout=600)
            return compiled_to

        with ThreadPoolExecutor(COMPILERS) as pool:
            objects = list(pool.map(compile_source, sources))
        made = Path(folder, library.name)
        subprocess.run([compiler, "-shared", "-pthread", *objects, "-ldl", "-o", made], check=True, timeout=600)
        made.rename(library)


def cpu(dtype: torch.dtype) -> ctypes.CDLL:
    """The installed library for tensors of ``dtype``, else one for any processor."""
    if native.library_path("cpu", dtype).exists():
        return native.library("cpu", dtype)
    return compiled(*sorted((CSRC / "cpu").glob("*.cpp")))


def use(library: Callable[[torch.dtype], ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``library(dtype)`` the native library of tensors on the CPU."""
    found = {dtype: library(dtype) for dtype in native.DTYPES}
    monkeypatch.setattr(native, "library", lambda device_type, dtype: found[dtype])
    monkeypatch.setattr(native, "unavailable_reason", lambda op, device_type, dtype: None)


def host_cuda(dtype: torch.dtype) -> ctypes.CDLL:
    """The CUDA kernels on the CPU, for any dtype."""
    return compiled(*HOST_CUDA)
