"""The stages of the check of a GPU: their commands, and how long each may take. Needs no torch."""

from __future__ import annotations

import os
import shutil
import sys
from dataclasses import dataclass, field, replace
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
MODES = (
    "float32", "bf16", "fp16", "fp8 delayed", "fp8 tensorwise", "fp8 rowwise", "fp8 blockwise", "fp8 mxfp8",
    "recompute", "activation offload", "optimizer offload", "muon", "attention dropout", "packed documents", "experts",
    "experts fp8", "window, bounded scores", "packed documents, bounded scores",
    "latent attention", "fused loss", "zero 1", "zero 3", "compiled", "cuda graphs", "any model, zero 1",
    "any model, zero 3", "checkpoint", "generation",
)  # fmt: skip
"""Trainings that ``training.py`` compares with the CPU."""
SHAPES = (
    "gpt 1b", "gpt 1b fp8", "llama 8b, 8 layers", "llama 8b, 8 layers, fp8", "mixtral, 2 layers", "latent attention",
    "latent attention fp8", "gpt 1b compiled", "llama 8b, 8 layers, compiled",
    "gpt 1b, cuda graphs", "llama 8b, 8 layers, cuda graphs", "mixtral, 2 layers, fp8",
    "gpt 1b, window, bounded scores",
)  # fmt: skip
"""Models that ``speed.py`` measures."""
FIRST = ("gpt 1b", "llama 8b, 8 layers")
"""The first stages after the build, so that a run that ends early has measured the speed of two trainings."""
LAYOUTS = (
    "tp2 sp", "pp2 1f1b", "pp2 zb_h1", "dp2 zero1", "dp2 zero3", "dp2 ep2", "cp2", "tp2 sp, cuda graphs",
)  # fmt: skip
"""Layouts of two ranks that ``layouts.py`` compares with one rank."""
TRACES = (
    "launches", "gradient reduction", "zero3 gathers", "tensor parallel", "expert all-to-all", "activation offload",
    "optimizer offload",
)  # fmt: skip
"""Measurements that ``trace.py`` reads from the profiler's trace."""
TESTED = {
    **{
        name: f"tests/ops/test_{name}.py"
        for name in (
            "norms",
            "activation",
            "softmax",
            "cross_entropy",
            "rope",
            "dropout",
            "multi_tensor",
            "weight_grad",
            "fp8_kernels",
            "operator",
            "precision",
            "large_reductions",
            "backend",
        )
    },
    "grouped": "tests/features/experts/test_grouped.py",
    "other_libraries": "tests/features/nvidia_libraries/test_libraries.py",
    "fp8": "tests/features/fp8/test_casts.py",
    "fp8_product": "tests/features/fp8/test_scaled_product.py",
}
"""Tests that run on a GPU, too; a fault that ends the use of the GPU in one does not hide others."""
BENCHMARKS: dict[str, tuple[str, ...]] = {
    # torch.compile takes about 10 s for each operation and length of rows.
    "operations": ("benchmarks.bench_ops_gpu", "--columns", "8192"),
    "fp8": ("benchmarks.bench_fp8_gpu",),
    "optimizer": ("benchmarks.bench_optimizer", "--device", "cuda", "--parameters", "500000000"),
}
TINY_BENCHMARKS: dict[str, tuple[str, ...]] = {
    "optimizer": (
        "benchmarks.bench_optimizer", "--parameters", "4000", "--rounds", "1", "--calls", "1", "--threads", "1",
    ),
}  # fmt: skip
"""Of ``--device cpu``: the other two need kernels or shapes of a GPU."""
WHEELS, PACKAGES = ROOT / "wheels", ROOT / "build" / "gpu_packages"
"""Wheels of packages that the machine lacks, and where they are installed; other Python programs do not see them."""
PATH = os.pathsep.join((os.environ.get("PATH", os.defpath), "/usr/local/cuda/bin"))
"""Where programs are searched: the CUDA toolkit's folder often is not on the PATH."""
TOGETHER = 4
"""Small stages that run at the same time on a GPU; each needs less than 3 GB there."""


@dataclass(frozen=True)
class Stage:
    """A command in a process of its own."""

    name: str
    command: tuple[str, ...]
    limit: float
    """Seconds until the process and its children are killed."""
    has_figures: bool = False
    """Whether the command takes ``--out FILE`` and writes its figures there."""
    environment: dict[str, str] = field(default_factory=dict)
    obstacle: str | None = None
    """Why this machine cannot run it."""
    is_small: bool = False
    """Whether others may run at the same time: it measures nothing, and leaves most of the device idle."""
    is_repeated: bool = False
    """Whether ``--continue`` runs it again, because later stages on a new machine need it."""


def all_stages(device: str) -> list[Stage]:
    """Every stage for ``cuda`` or ``cpu``, in order: the ones that others need, two
    speeds, correctness, the other speeds, slow checks."""
    trainings = [_own(f"train {mode}", "training", 180.0, mode, "--device", device) for mode in MODES]
    # The limits of speeds include torch.compile of all layers, those of layouts the start of four worlds.
    speeds = [_own(f"speed {shape}", "speed", 240.0, shape, "--device", device) for shape in (*FIRST, *SHAPES)]
    layouts = [_own(f"layout {name}", "layouts", 240.0, name, "--device", device) for name in LAYOUTS]
    layouts.append(_own("layout verify", "layouts", 480.0, "verify", "--device", device))
    traces = [_own(f"trace {name}", "trace", 180.0, name, "--device", device) for name in TRACES]
    benchmarks = BENCHMARKS if device == "cuda" else TINY_BENCHMARKS
    first = [*_packages(), _own("environment", "environment", 120.0, "--device", device), _build(device)]
    stages = [
        *(replace(stage, is_repeated=True) for stage in first),
        *speeds[: len(FIRST)],
        traces[0],
        *(replace(stage, is_small=True) for stage in (*_kernels(device), *trainings)),
        *layouts,
        *traces[1:],
        *(stage for stage in speeds[len(FIRST) :] if stage not in speeds[: len(FIRST)]),
        *(
            Stage(f"benchmark {name}", (sys.executable, "-m", *command, "--no-keep"), 420.0)
            for name, command in benchmarks.items()
        ),
        *_sanitizers(device),
    ]
    hidden = {"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}
    return [replace(stage, environment=stage.environment | hidden) for stage in stages]


def _packages() -> list[Stage]:
    """Install the wheels in the folder ``wheels``, if there is one, for the other stages; without a network."""
    wheels = tuple(str(path) for path in sorted(WHEELS.glob("*.whl")))
    pip = (sys.executable, "-m", "pip", "install", "--no-index", "--no-deps", "--upgrade", "--target", str(PACKAGES))
    return [Stage("packages", (*pip, *wheels), 120.0)] if wheels else []


def _own(name: str, module: str, limit: float, *arguments: str) -> Stage:
    command = (sys.executable, "-m", f"benchmarks.gpu.{module}", *arguments)
    on_cpu = arguments[-1:] == ("cpu",)
    obstacle = "CUDA graphs need a GPU" if "cuda graphs" in name and on_cpu else None
    if module == "trace" and arguments[0] != TRACES[0] and on_cpu:
        obstacle = "transfers overlap on a GPU"
    return Stage(name, command, limit, has_figures=True, obstacle=obstacle)


def _build(device: str) -> Stage:
    """Compile the native libraries into ``megatron_core/ops/lib`` without pip, which would need the network."""
    obstacle = None
    nvcc = os.environ.get("CUDACXX") or "nvcc"
    if device == "cpu":
        obstacle = "--device cpu uses the libraries that are installed"
    elif not (ROOT / "csrc").exists():
        obstacle = "the sources are not here, as in a container; the installed package has its libraries"
    elif shutil.which("cmake", path=PATH) is None:
        obstacle = "cmake was not found; install it (pip install cmake), or use libraries that are built already"
    elif shutil.which(nvcc, path=PATH) is None:
        obstacle = (
            f"{nvcc} was not found, so operations use a library built before or their references in PyTorch; install "
            "the CUDA toolkit, and add nvcc to the PATH or set CUDACXX to it"
        )
    return _own("build", "build", 150.0) if obstacle is None else Stage("build", ("cmake",), 600.0, obstacle=obstacle)


def _kernels(device: str) -> list[Stage]:
    """The tests of the operations against float64, a process for each file."""
    if device == "cpu":
        command = (sys.executable, "-m", "pytest", "-q", "tests/ops/test_softmax.py", "-k", "gradcheck")
        return [Stage("kernels", command, 480.0)]
    # The kernels of CPUs are tested elsewhere. A kernel that fails is reported by the test that has started it.
    selected, settings = ("--maxfail", "20", "-k", "not cpu and not host"), {"CUDA_LAUNCH_BLOCKING": "1"}
    return [
        Stage(
            f"kernels {name}",
            (sys.executable, "-m", "pytest", "-q", *selected, path),
            300.0,
            environment=settings,
        )
        for name, path in TESTED.items()
    ]


def _sanitizers(device: str) -> list[Stage]:
    """compute-sanitizer."""
    found, sanitizer = [], shutil.which("compute-sanitizer", path=PATH)
    obstacle = "compute-sanitizer was not found; it is part of the CUDA toolkit" if sanitizer is None else None
    if device == "cpu":
        obstacle = "compute-sanitizer needs a GPU"
    for tool, settings in {"memcheck": {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, "racecheck": {}}.items():
        command = (sanitizer or "compute-sanitizer", "--tool", tool, "--error-exitcode", "1", sys.executable)
        found.append(Stage(tool, (*command, "-m", "tests.ops.run_all"), 300.0, environment=settings, obstacle=obstacle))
    return found
