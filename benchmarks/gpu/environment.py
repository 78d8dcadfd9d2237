"""Requirements of the check of a GPU on this machine: versions, what is missing, and what to do about it."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import os
import platform
import shutil
import subprocess
import sys

from benchmarks.gpu.figures import arguments, write_figures
from benchmarks.gpu.stages import ROOT, WHEELS

REQUIRED = {
    "torch": "torch", "numpy": "numpy", "lazy_loader": "lazy-loader", "tyro": "tyro", "typeguard": "typeguard",
    "docstring_parser": "docstring-parser", "yaml": "pyyaml", "jinja2": "jinja2", "safetensors": "safetensors",
    "xxhash": "xxhash", "tokenizers": "tokenizers", "sentencepiece": "sentencepiece", "tiktoken": "tiktoken",
    "orjson": "orjson",
}  # fmt: skip
"""Modules without which no training starts, and the packages that have them."""
OPTIONAL = {
    "pytest": "the stage kernels",
    "hypothesis": "the stage kernels",
    "pytest_timeout": "the stage kernels",
    "transformers": "the stages of any model",
}
ANSWER = 20
"""Seconds in which a program has to print its version."""
OLDEST = (8, 0)
"""Compute capability of the oldest GPU that the kernels are compiled for."""


def version_of(program: str, *flags: str) -> str | None:
    """Return the last line of a program's output; None if the program is missing or fails."""
    path = shutil.which(program)  # the PATH of a stage has the CUDA toolkit's folder
    if path is None:
        return None
    try:
        result = subprocess.run([path, *flags], capture_output=True, text=True, timeout=ANSWER)
    except subprocess.TimeoutExpired:
        return f"did not answer within {ANSWER} s"
    lines = result.stdout.strip().splitlines()
    return lines[-1] if lines and result.returncode == 0 else None


def gpu() -> tuple[dict[str, object], list[str]]:
    """The GPU as torch sees it, and what is wrong."""
    import torch

    from megatron_core.reports.fast_paths import Platform, describe_paths

    seen: dict[str, object] = {"torch": torch.__version__, "torch_cuda": torch.version.cuda or "none"}
    for name in ("triton", "transformers", "numpy"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            seen[name] = importlib.metadata.version(name)
    if torch.version.cuda is None:
        return seen, ["this torch was built without CUDA; install torch with CUDA, or set PYTHON to a Python with it"]
    if not torch.cuda.is_available():
        return seen, [
            f"torch, built with CUDA {torch.version.cuda}, sees no GPU; check that nvidia-smi lists it, that its "
            "driver supports this CUDA version, and that CUDA_VISIBLE_DEVICES does not hide it"
        ]
    device = torch.cuda.get_device_properties(0)
    seen |= {
        "gpu": device.name,
        "capability": f"{device.major}.{device.minor}",
        "memory_gib": device.total_memory / 2**30,
        "gpus": torch.cuda.device_count(),
        "bf16": torch.cuda.is_bf16_supported(),
        "cudnn": torch.backends.cudnn.version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
    }
    seen["fast_paths"] = list(describe_paths(Platform.current()))
    torch.ones(8, 8, device="cuda").mm(torch.ones(8, 8, device="cuda")).sum().item()  # a kernel starts and ends
    if (device.major, device.minor) < OLDEST:
        seen["note"] = f"the native kernels need compute capability 8.0, and {device.name} has {seen['capability']}"
    return seen, []


def main() -> int:
    """Print and write what was found; exit with 1 if trainings cannot start."""
    given = arguments()
    nvcc = os.environ.get("CUDACXX") or "nvcc"
    query = "--query-gpu=name,driver_version,memory.total"
    seen: dict[str, object] = {
        "python": platform.python_version(),
        "revision": version_of("git", "-C", str(ROOT), "rev-parse", "HEAD") or "unknown",
        "nvidia_smi": version_of("nvidia-smi", query, "--format=csv,noheader") or "none",
        "nvcc": version_of(nvcc, "--version") or "none",
        "cmake": version_of("cmake", "--version") or "none",
        "compute_sanitizer": shutil.which("compute-sanitizer") or "none",
    }
    absent = [package for name, package in REQUIRED.items() if importlib.util.find_spec(name) is None]
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    missing = []
    if absent:
        download = f"pip download --only-binary=:all: --no-deps --python-version {version} -d {WHEELS.name}"
        missing.append(
            f"{', '.join(absent)} not installed; pip install -e . (once, with a network), or on a machine with a "
            f"network {download} {' '.join(absent)}, and copy the folder here"
        )
    seen["without"] = [f"{name}: {stage}" for name, stage in OPTIONAL.items() if importlib.util.find_spec(name) is None]
    if given.device == "cuda" and importlib.util.find_spec("torch") is not None:
        found, wrong = gpu()
        seen, missing = seen | found, missing + wrong
    elif given.device == "cpu" and not missing:
        seen["torch"] = importlib.metadata.version("torch")
    write_figures(given.out, seen | {"missing": missing})
    return 1 if missing else 0


if __name__ == "__main__":
    sys.exit(main())
