"""Native libraries for tests: the installed one, or one that is compiled here; and the CUDA sources on the CPU."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from functools import cache
from pathlib import Path
from tempfile import mkdtemp

import pytest

from megatron_core.ops import native

ROOT = Path(__file__).parents[2]
CSRC = ROOT / "csrc"
HOST_CUDA = (CSRC / "cuda" / "norm.cu", CSRC / "host_cuda" / "fibers.cpp")


@cache
def compiled(*sources: Path) -> ctypes.CDLL:
    """A library of these sources; skips the test where there is no C++ compiler."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("there is no C++ compiler (c++, g++ or clang++) to compile csrc with")
    folder = Path(mkdtemp(prefix="megatron-native-"))
    flags = [
        "-std=c++17",
        "-O2",
        "-fPIC",
        "-shared",
        "-pthread",
        "-Wall",
        "-Werror",
        "-Wno-unknown-pragmas",
        "-Wno-psabi",
    ]
    command = [compiler, *flags, f"-I{CSRC}", "-x", "c++", *map(str, sources), "-o", str(folder / "library.so")]
    subprocess.run(command, check=True, timeout=120)
    library = ctypes.CDLL(str(folder / "library.so"))
    shutil.rmtree(folder)
    return library


def cpu() -> ctypes.CDLL:
    """The library that the build made, else one for any processor."""
    if native.library_path("cpu").exists():
        return native.library("cpu")
    return compiled(*sorted((CSRC / "cpu").glob("*.cpp")))


def use(library: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let ``library`` serve tensors on the CPU."""
    monkeypatch.setattr(native, "library", lambda device_type: library)
    monkeypatch.setattr(native, "why_not", lambda op, device_type, dtype: None)
