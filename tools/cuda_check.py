"""Compile the CUDA kernels and print registers, shared memory and spills of each; exit with 1 if registers spill.

It needs nvcc (on the PATH, or as $CUDACXX), but neither a GPU nor torch:

    python tools/cuda_check.py
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from megatron_core.errors import ConfigError, MegatronError
from megatron_core.terminal import parse_flags

CSRC = Path(__file__).resolve().parent.parent / "csrc"
LIBRARY = ("80", "90a", "100")
"""The compute capabilities of csrc/cuda/CMakeLists.txt."""

ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compile the CUDA kernels and print the resources that each uses."""

    architectures: tuple[str, ...] = LIBRARY
    """Compute capabilities, 80 or higher; those that nvcc does not support are skipped with a message."""


@dataclass(frozen=True)
class Kernel:
    """The resources of one kernel on one architecture, as reported by ptxas."""

    name: str
    architecture: str
    registers: int
    shared_bytes: int
    spilled_bytes: int


def parse(log: str) -> list[Kernel]:
    """The kernels in the verbose output of ptxas, in order."""
    kernels = []
    for part in log.split("Compiling entry function ")[1:]:
        entry = ENTRY.match("Compiling entry function " + part)
        spills, used = SPILLS.search(part), USED.search(part)
        if entry is None or spills is None or used is None:
            raise ConfigError(f"this output of ptxas cannot be parsed: {part[:200]!r}; use another CUDA version")
        kernels.append(
            Kernel(
                entry["name"], entry["architecture"], int(used[1]), int(used[2] or 0), int(spills[1]) + int(spills[2])
            )
        )
    return kernels


def find_nvcc() -> str:
    """The compiler; ConfigError if there is none."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        raise ConfigError(
            "nvcc was not found; install the CUDA toolkit, and add nvcc to the PATH or set $CUDACXX to it"
        )
    return nvcc


def known_to(nvcc: str, architectures: Iterable[str]) -> list[str]:
    """The architectures that the compiler supports."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout.split()
    return [architecture for architecture in architectures if f"compute_{architecture.rstrip('a')}" in listed]


def compile_source(nvcc: str, source: Path, oldest: str, architectures: Iterable[str]) -> str:
    """Compile one file with the library's flags, from PTX of the oldest architecture; return the output of ptxas."""
    machine_code = ",".join(f"sm_{number}" for number in architectures)
    targets = f"-gencode=arch=compute_{oldest.rstrip('a')},code=[{machine_code}]"
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "-std=c++17", "-Xptxas=-v", targets, f"-I{CSRC}", "-c", str(source)]
        result = subprocess.run([*command, "-o", f"{folder}/kernels.o"], capture_output=True, text=True)
    if result.returncode:
        raise ConfigError(f"{source} does not compile:\n{result.stderr}{result.stdout}")
    return result.stderr + result.stdout


def readable(names: Iterable[str]) -> dict[str, str]:
    """The C++ names of kernels without arguments; the mangled names if c++filt is not installed."""
    names = list(names)
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    if tool is None:
        return {name: name for name in names}
    found = subprocess.run([tool], input="\n".join(names), check=True, capture_output=True, text=True).stdout
    plain = (re.sub(r"^void |megatron::|\(int\)", "", line).split("(")[0] for line in found.splitlines())
    return dict(zip(names, plain, strict=True))


def table(kernels: list[Kernel]) -> str:
    """A table with a line for each kernel and a column for each architecture."""
    names = readable(dict.fromkeys(kernel.name for kernel in kernels))
    architectures = list(dict.fromkeys(kernel.architecture for kernel in kernels))
    cells: dict[str, dict[str, str]] = defaultdict(dict)
    for kernel in kernels:
        spilled = f" +{kernel.spilled_bytes} B spilled" if kernel.spilled_bytes else ""
        cells[kernel.name][kernel.architecture] = f"{kernel.registers} regs, {kernel.shared_bytes} B{spilled}"
    wide = max(map(len, names.values()))
    lines = ["  ".join([" " * wide, *(f"{architecture:16}" for architecture in architectures)])]
    for name, found in cells.items():
        lines.append("  ".join([names[name].ljust(wide), *(f"{found.get(a, ''):16}" for a in architectures)]))
    return "\n".join(line.rstrip() for line in lines)


def main(settings: Settings) -> int:
    """Compile all kernels and print the table; return 1 if one spills."""
    nvcc = find_nvcc()
    library, architectures = known_to(nvcc, LIBRARY), known_to(nvcc, settings.architectures)
    for wanted, known in ((LIBRARY, library), (settings.architectures, architectures)):
        if not known:
            raise ConfigError(f"{nvcc} supports none of {', '.join(wanted)}; use CUDA 11.2 or newer")
    for absent in sorted(set(settings.architectures) - set(architectures)):
        print(f"skipped: this nvcc does not support compute capability {absent}")
    kernels = []
    for source in sorted((CSRC / "cuda").glob("*.cu")):
        kernels += parse(compile_source(nvcc, source, library[0], architectures))
    print(table(kernels))
    spilling = [kernel for kernel in kernels if kernel.spilled_bytes]
    print(
        f"{len(kernels)} kernels, at most {max(k.registers for k in kernels)} registers, {len(spilling)} of them spill"
    )
    return 1 if spilling else 0


if __name__ == "__main__":
    try:
        sys.exit(main(parse_flags(Settings, description=__doc__)))
    except MegatronError as error:
        sys.exit(str(error))
