"""Installed versions, devices, kernels and collectives of this machine, for megatron-doctor."""

import importlib.metadata
import platform
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator, Sequence

import torch
import torch.distributed as dist

from megatron_core.cpu_ranks.shared_memory import host
from megatron_core.features.equal_bits import fixed_products
from megatron_core.features.nvidia_libraries.libraries import LIBRARIES
from megatron_core.ops import native
from megatron_core.ops.backend import OPS
from megatron_core.parallel.collectives import all_gather_flat_, reduce_scatter_flat_
from megatron_core.reports.fast_paths import Platform, describe_paths
from megatron_core.verify.ranks import RankFailure, run_ranks

OPTIONAL = {
    "gigatoken": "tokenizes several times as fast (used if it gives the same tokens): pip install gigatoken",
    "nltk": "splits documents into sentences (--split-sentences): pip install nltk",
}
REQUIRED = ("numpy", "tyro", "tokenizers", "sentencepiece", "tiktoken", "safetensors")
RANKS = 2


def version_of(package: str) -> str | None:
    """The version of a package; None if it is not installed."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def versions() -> Iterator[str]:
    """Python, torch, required packages and compilers."""
    yield f"python {platform.python_version()} on {platform.system()} {platform.machine()}"
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield f"torch {torch.__version__}, built with {cuda}"
    yield ", ".join(f"{package} {version_of(package) or 'absent'}" for package in REQUIRED)
    for program in ("c++", "nvcc"):
        yield f"{program}: {program_version(program) or 'not found'}"


def program_version(program: str) -> str | None:
    """The line with the version in the output of ``program --version``; None if the program is not installed."""
    path = shutil.which(program)
    if path is None:
        return None
    lines = subprocess.run([path, "--version"], capture_output=True, text=True).stdout.splitlines()
    version_lines = [line for line in lines if "release" in line] or lines[:1]
    return f"{version_lines[0]} ({path})" if version_lines else path


def devices() -> Iterator[str]:
    """CPU, GPUs, and the interconnect of the GPUs."""
    capability = torch.backends.cpu.get_cpu_capability()
    yield f"cpu: {torch.get_num_threads()} threads, vector instructions {capability}"
    count = torch.cuda.device_count()
    for index in range(count):
        seen = torch.cuda.get_device_properties(index)
        yield f"cuda:{index}: {seen.name}, sm_{seen.major}{seen.minor}, {seen.total_memory / 2**30:.0f} GiB"
    if not count:
        yield "cuda: torch sees no GPU"
    pairs = [(a, b) for a in range(count) for b in range(count) if a != b]
    if pairs:
        direct = sum(torch.cuda.can_device_access_peer(a, b) for a, b in pairs)
        yield f"interconnect: {direct} of {len(pairs)} pairs of GPUs can access each other's memory directly"
    offered = {"gloo": dist.is_gloo_available(), "nccl": dist.is_nccl_available(), "mpi": dist.is_mpi_available()}
    yield "torch.distributed: " + ", ".join(f"{name} {'yes' if there else 'no'}" for name, there in offered.items())


def kernel_lines() -> Iterator[str]:
    """For each operation, device and dtype, the backend that ``--kernel-backend auto`` selects, and why."""
    for device_type in ("cpu", "cuda"):
        for op in OPS:
            dtypes_by_backend: dict[str, list[str]] = {}
            for dtype in native.DTYPES:
                dtypes_by_backend.setdefault(selected(op, device_type, dtype), []).append(
                    str(dtype).removeprefix("torch.")
                )
            for chosen, dtypes in dtypes_by_backend.items():
                yield f"{op} on {device_type}, {' '.join(dtypes)}: {chosen}"
    yield f"products of --layout-invariant on cpu: {fixed_products.describe_products('cpu')}"


def other_libraries() -> Iterator[str]:
    """For each optional library with fused operations, whether it is usable, and which operations have limits."""
    for name, library in LIBRARIES.items():
        states: dict[str, list[str]] = {}
        for op in library.OPS:
            states.setdefault(library.unavailable_reason(op, "cuda", torch.bfloat16) or "available", []).append(op)
        for state, ops in states.items():
            partial = ", ".join(op for op in ops if op in library.PARTIAL_OPS)
            limits = ""
            if partial and state == "available":
                limits = f"; {partial} only for some arguments, see docs/kernels.md"
            yield f"--kernel-backend {name}, for {', '.join(ops)} on cuda: {state}{limits}"


def selected(op: str, device_type: str, dtype: torch.dtype) -> str:
    """The backend of an operation, and the reason if it is not native."""
    obstacle = native.unavailable_reason(op, device_type, dtype)
    if obstacle is not None:
        return f"reference (PyTorch), because {obstacle}"
    return f"native, {native.library_path(device_type, dtype).name}, for {native.architecture(device_type, dtype)}"


def failing_collectives() -> list[str]:
    """Run each collective that training uses, on every rank; return the names of those with a wrong result."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    world = dist.group.WORLD
    assert world is not None
    device = torch.device("cuda", rank) if dist.get_backend() == "nccl" else torch.device("cpu")
    values = torch.full((4,), rank + 1.0, device=device)
    everyone = torch.arange(1.0, size + 1, device=device)
    results = {}
    results["all_reduce"] = values.clone()
    dist.all_reduce(results["all_reduce"])
    results["broadcast"] = values.clone()
    dist.broadcast(results["broadcast"], 0)
    results["all_gather"] = values.new_empty(4 * size)
    all_gather_flat_(results["all_gather"], values, world)
    results["reduce_scatter"] = values.new_empty(4)
    reduce_scatter_flat_(results["reduce_scatter"], values.repeat(size), world)
    results["all_to_all"] = values.new_empty(size)
    dist.all_to_all_single(results["all_to_all"], values[:1].repeat(size))
    results["send and receive"] = values.new_empty(4)
    for sender in range(size):
        if rank == sender:
            dist.send(values, (rank + 1) % size)
        elif rank == (sender + 1) % size:
            dist.recv(results["send and receive"], sender)
    expected = {
        "all_reduce": everyone.sum().expand(4),
        "broadcast": everyone[:1].expand(4),
        "all_gather": everyone.repeat_interleave(4),
        "reduce_scatter": everyone.sum().expand(4),
        "all_to_all": everyone,
        "send and receive": everyone[rank - 1].expand(4),
    }
    return [name for name, tensor in results.items() if not torch.equal(tensor, expected[name])]


def collectives(backend: str) -> tuple[bool, str]:
    """Whether the collectives of two ranks over gloo, shm (both on the CPU) or nccl work, and a message about it."""
    missing = host.shared_memory_library() if backend == "shm" else None
    if isinstance(missing, str):
        return True, f"shm: ranks on the CPU use gloo, because {missing}"
    device = "cuda" if backend == "nccl" else "cpu"
    try:
        wrong = sorted(
            {
                name
                for names in run_ranks(RANKS, failing_collectives, timeout=60.0, device=device, backend=backend)
                for name in names
            }
        )
    except RankFailure as error:
        return False, f"{backend}, {RANKS} ranks: failed: {str(error).splitlines()[-1]}"
    if wrong:
        return False, f"{backend}, {RANKS} ranks: wrong results of {', '.join(wrong)}"
    return True, f"{backend}, {RANKS} ranks: all collectives work"


def advice() -> Iterator[str]:
    """Recommended packages."""
    if not native.library_path("cpu", torch.float32).exists():
        yield "native operations on the CPU: a C++ compiler (GCC or Clang), then pip install . (or -e .) again"
    if torch.cuda.is_available() and not native.library_path("cuda", torch.float32).exists():
        yield "native operations on the GPU: the CUDA toolkit (nvcc), then pip install . (or -e .) again"
    if shutil.which("nvidia-smi") and not torch.cuda.is_available():
        yield "a build of torch with CUDA: nvidia-smi exists, but torch sees no GPU; see https://pytorch.org"
    for package, use in OPTIONAL.items():
        if version_of(package) is None:
            yield f"{package}: {use}"


def brief(results: Sequence[tuple[bool, str]]) -> Iterator[str]:
    """Yield five lines: versions, devices, kernels, the ``results`` of collectives, and what to install."""
    cuda = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA"
    yield f"versions:     python {platform.python_version()}, torch {torch.__version__} ({cuda})"
    gpus = Counter(torch.cuda.get_device_properties(index).name for index in range(torch.cuda.device_count()))
    listed = ", ".join(f"{count} x {name}" for name, count in gpus.items()) or "no GPU"
    yield f"devices:      {torch.get_num_threads()} CPU threads ({torch.backends.cpu.get_cpu_capability()}), {listed}"
    yield f"kernels:      {', '.join(native_share(device) for device in ('cpu', *(['cuda'] if gpus else [])))}"
    failures = [message for good, message in results if not good]
    working = ", ".join(message.partition(",")[0].partition(":")[0] for good, message in results if good)
    yield f"collectives:  {'; '.join(failures) or (f'{working} work with {RANKS} ranks' if working else 'not tested')}"
    yield f"recommended:  {'; '.join(advice()) or 'nothing to install'}"


def native_share(device_type: str) -> str:
    """Return how many operations have a native kernel in float32 and bfloat16, and the first obstacle of the others."""
    obstacles = [
        reason
        for op in OPS
        for dtype in (torch.float32, torch.bfloat16)
        if (reason := native.unavailable_reason(op, device_type, dtype)) is not None
    ]
    total = 2 * len(OPS)
    text = f"{device_type}: {total - len(obstacles)} of {total} operations and dtypes native"
    return f"{text} ({obstacles[0]})" if obstacles else text


def show_section(title: str, lines: Iterator[str] | list[str]) -> None:
    """Print a heading and indented lines."""
    print(title)
    for line in lines:
        print(f"  {line}")


def examine(*, with_collectives: bool, verbose: bool) -> int:
    """Print five lines, or everything if ``verbose``; return 1 if the collectives do not work.

    with_collectives: whether two processes test each backend.
    """
    kinds = ["gloo", "shm", *(["nccl"] if torch.cuda.device_count() >= RANKS else [])] if with_collectives else []
    results = [collectives(backend) for backend in kinds]
    if verbose:
        show_section("versions", versions())
        show_section("devices", devices())
        show_section("operations with --kernel-backend auto", kernel_lines())
        show_section("optional libraries", other_libraries())
        show_section("fast paths of GPUs", describe_paths(Platform.current()))
        if results:
            show_section("collectives", [sentence for _, sentence in results])
        show_section("recommended to install", list(advice()) or ["nothing: all is installed"])
    else:
        print("\n".join(brief(results)))
    return 0 if all(good for good, _ in results) else 1
