"""Native libraries for tests: the installed one, or one that is compiled here; and the CUDA sources on the CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest
import torch

from megatron_core.ops import native

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
HOST_CUDA = (*sorted((CSRC / "cuda").glob("*.cu")), CSRC / "host_cuda" / "fibers.cpp")
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-Wall", "-Werror", "-Wno-unknown-pragmas", "-Wno-psabi", f"-I{CSRC}"]
COMPILERS = 2


@cache
def compiled(*sources: Path) -> ctypes.CDLL:
    """A library of these sources; skips the test where there is no C++ compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (c++, g++ or clang++) to compile csrc with")
    folder = Path(mkdtemp(prefix="megatron-native-"))

    def compile_source(source: Path) -> str:
        compiled_to = folder / f"{source.name}.o"
        subprocess.run([compiler, *FLAGS, "-x", "c++", "-c", source, "-o", compiled_to], check=True, timeout=300)
        return str(compiled_to)

    with ThreadPoolExecutor(COMPILERS) as pool:
        objects = list(pool.map(compile_source, sources))
    subprocess.run([compiler, "-shared", "-pthread", *objects, "-ldl", "-o", folder / "library.so"], check=True)
    library = ctypes.CDLL(str(folder / "library.so"))
    shutil.rmtree(folder)
    return library


def cpu(dtype: torch.dtype) -> ctypes.CDLL:
    """The library that the build made for tensors of ``dtype``, else one for any processor."""
    if native.library_path("cpu", dtype).exists():
        return native.library("cpu", dtype)
    return compiled(*sorted((CSRC / "cpu").glob("*.cpp")))


def use(library: Callable[[torch.dtype], ctypes.CDLL], monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ``library(dtype)`` the native library of tensors on the CPU."""
    found = {dtype: library(dtype) for dtype in native.DTYPES}
    monkeypatch.setattr(native, "library", lambda device_type, dtype: found[dtype])
    monkeypatch.setattr(native, "unavailable_reason", lambda op, device_type, dtype: None)


def host_cuda(dtype: torch.dtype) -> ctypes.CDLL:
    """The CUDA kernels, which run on the CPU; those for any dtype."""
    return compiled(*HOST_CUDA)
