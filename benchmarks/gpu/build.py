"""Compile the native libraries, as an editable install does, without pip."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.gpu.figures import out_file, write_figures
from benchmarks.gpu.stages import ROOT


def main() -> int:
    """Configure and compile; fail if there is no CUDA library afterwards."""
    out, folder = out_file(), ROOT / "build" / "gpu"
    configure = ["cmake", "-S", str(ROOT / "csrc/editable"), "-B", str(folder), "-DCMAKE_BUILD_TYPE=Release"]
    for command in (configure, ["cmake", "--build", str(folder), "--parallel", str(os.cpu_count() or 1)]):
        if status := subprocess.run(command).returncode:
            return status
    libraries = sorted(Path(ROOT / "megatron_core/ops/lib").glob("*.so"))
    write_figures(out, {"libraries": [library.name for library in libraries]})
    if not any(library.name == "libmegatron_cuda.so" for library in libraries):
        print("the build made no libmegatron_cuda.so; the lines of cmake above say why")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
