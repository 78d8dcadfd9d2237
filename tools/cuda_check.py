"""Compile the CUDA kernels and say what each takes: registers, shared memory, spills; fails where registers spill.

It needs nvcc (on the PATH, or as $CUDACXX), and neither a GPU nor torch:

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

import tyro

from megatron_core.errors import ConfigError, MegatronError

CSRC = Path(__file__).resolve().parent.parent / "csrc"
LIBRARY = ("80", "90a", "100")
"""The compute capabilities of csrc/cuda/CMakeLists.txt."""

ENTRY = re.compile(r"Compiling entry function '(?P<name>\w+)' for '(?P<architecture>\w+)'")
SPILLS = re.compile(r"(\d+) bytes spill stores, (\d+) bytes spill loads")
USED = re.compile(r"Used (\d+) registers(?:.*?(\d+) bytes smem)?")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compile the CUDA kernels and say what each takes."""

    architectures: tuple[str, ...] = LIBRARY
    """Compute capabilities from 80 on; those that this nvcc does not know are left out, and named."""


@dataclass(frozen=True)
class Kernel:
    """What ptxas says of one kernel on one architecture."""

    name: str
    architecture: str
    registers: int
    shared_bytes: int
    spilled_bytes: int


def parse(log: str) -> list[Kernel]:
    """The kernels of ptxas' verbose output, in its order."""
    kernels = []
    for part in log.split("Compiling entry function ")[1:]:
        entry = ENTRY.match("Compiling entry function " + part)
        spills, used = SPILLS.search(part), USED.search(part)
        if entry is None or spills is None or used is None:
            raise ConfigError(f"ptxas says something that is not understood here: {part[:200]!r}")
        kernels.append(
            Kernel(
                entry["name"], entry["architecture"], int(used[1]), int(used[2] or 0), int(spills[1]) + int(spills[2])
            )
        )
    return kernels


def find_nvcc() -> str:
    """The compiler; ConfigError where there is none."""
    nvcc = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if nvcc is None:
        raise ConfigError(
            "nvcc was not found; install the CUDA toolkit, and put it on the PATH or its nvcc in $CUDACXX"
        )
    return nvcc


def known_to(nvcc: str, architectures: Iterable[str]) -> list[str]:
    """Those that the compiler knows."""
    listed = subprocess.run([nvcc, "--list-gpu-arch"], check=True, capture_output=True, text=True).stdout.split()
    return [architecture for architecture in architectures if f"compute_{architecture.rstrip('a')}" in listed]


def compile_source(nvcc: str, source: Path, oldest: str, architectures: Iterable[str]) -> str:
    """Compile one file, as the library does, from the oldest architecture's intermediate code; what ptxas says."""
    machine_code = ",".join(f"sm_{number}" for number in architectures)
    targets = f"-gencode=arch=compute_{oldest.rstrip('a')},code=[{machine_code}]"
    with tempfile.TemporaryDirectory() as folder:
        command = [nvcc, "-std=c++17", "-Xptxas=-v", targets, f"-I{CSRC}", "-c", str(source)]
        result = subprocess.run([*command, "-o", f"{folder}/kernels.o"], capture_output=True, text=True)
    if result.returncode:
        raise ConfigError(f"{source} does not compile:\n{result.stderr}{result.stdout}")
    return result.stderr + result.stdout


def readable(names: Iterable[str]) -> dict[str, str]:
    """C++ names of kernels without their arguments, where c++filt is there to undo the mangling."""
    names = list(names)
    tool = shutil.which("c++filt") or shutil.which("cu++filt")
    if tool is None:
        return {name: name for name in names}
    found = subprocess.run([tool], input="\n".join(names), check=True, capture_output=True, text=True).stdout
    plain = (re.sub(r"^void |megatron::|\(int\)", "", line).split("(")[0] for line in found.splitlines())
    return dict(zip(names, plain, strict=True))


def table(kernels: list[Kernel]) -> str:
    """A line for each kernel, the registers of each architecture side by side."""
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
    """Compile everything, print the table; 1 where a kernel spills."""
    nvcc = find_nvcc()
    library, architectures = known_to(nvcc, LIBRARY), known_to(nvcc, settings.architectures)
    for wanted, known in ((LIBRARY, library), (settings.architectures, architectures)):
        if not known:
            raise ConfigError(f"{nvcc} knows none of {', '.join(wanted)}; CUDA 11.2 or newer does")
    for absent in sorted(set(settings.architectures) - set(architectures)):
        print(f"left out: this nvcc does not know compute capability {absent}")
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
        sys.exit(main(tyro.cli(Settings, description=__doc__)))
    except MegatronError as error:
        sys.exit(str(error))
