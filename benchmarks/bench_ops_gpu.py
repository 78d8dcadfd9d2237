"""The fused operations on a GPU, compared with a measured copy, torch eager, torch.compile, and other libraries.

Bandwidth is the minimal traffic of a pass (``OpCase.moved``) divided by its median time by device events; ``of_peak``
in benchmarks/results.csv is relative to the copy, ``ratio`` is the time relative to torch eager.

python -m benchmarks.bench_ops_gpu
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product

import torch
import tyro
from torch import Tensor

from benchmarks.bench_ops import Case, as_tuple, contender
from benchmarks.op_cases import CASES
from benchmarks.results import Row, append
from megatron_core.features.fp8 import casts as fp8
from megatron_core.ops.backend import LIBRARIES

GIGA = 1e9
AIMS = {"forward": 0.85, "backward": 0.75}
"""Target of the native kernel's bandwidth relative to the copy."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure the fused operations on the GPU."""

    ops: tuple[str, ...] = tuple(CASES)
    """Operations to measure."""
    columns: tuple[int, ...] = (4096, 8192, 16384)
    """Lengths of rows; the number of rows follows from the number of elements."""
    elements: int = 2**27
    """Elements of the largest tensor, more than fit into the cache."""
    dtypes: tuple[str, ...] = ("bfloat16",)
    """Data types, by torch's names."""
    repeats: int = 30
    """Timed calls of each pass, after three warm-up calls."""
    keep: bool = True
    """Append to benchmarks/results.csv."""


def seconds(work: Callable[[], object], repeats: int) -> float:
    """Median time of a call on the device.

    The host does not wait between calls, so that each is queued before the previous one ends; otherwise the time of
    Python would count.
    """
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(repeats + 3)]
    for begin, end in events:
        begin.record()
        work()
        end.record()
    torch.cuda.synchronize()
    return statistics.median(begin.elapsed_time(end) for begin, end in events[3:]) / 1e3


def copy_bandwidth(repeats: int) -> float:
    """Bytes per second, read and written, of a copy of 1 GiB on the device."""
    source = torch.randn(2**28)
    target = torch.empty_like(source)
    return 2 * size([source]) / seconds(lambda: target.copy_(source), repeats)


def size(tensors: list[Tensor]) -> int:
    """Total bytes of tensors."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def names_of(case: Case) -> list[str]:
    """The contenders for a case: another library is included if it is installed and supports the call."""
    timed = CASES[case.op]
    deciding = timed.deciding(*timed.inputs(*case.shape, case.dtype))
    there = [
        name
        for name, library in LIBRARIES.items()
        if timed.op in library.OPS
        and library.unavailable_reason(timed.op, "cuda", case.dtype) is None
        and library.supports_call(timed.op, *deciding)
    ]
    return ["eager", "compiled", "native", *there]


def measure(case: Case, name: str, repeats: int) -> dict[str, tuple[float, float]]:
    """Seconds and bytes per second of both passes."""
    inputs = CASES[case.op].inputs(*case.shape, case.dtype)
    function = contender(case, name)
    outputs = as_tuple(function(*inputs))
    grads = [torch.randn_like(y) for y in outputs]
    wanted = [tensor for tensor in inputs if tensor.requires_grad]
    backward = partial(torch.autograd.grad, outputs, wanted, grads, retain_graph=True)
    moved = dict(zip(AIMS, (count * size(inputs[:1]) for count in CASES[case.op].moved(*inputs)), strict=True))
    with torch.no_grad():
        times = {"forward": seconds(partial(function, *inputs), repeats)}
    times["backward"] = seconds(backward, repeats)
    return {way: (time, moved[way] / time) for way, time in times.items()}


def report(case: Case, found: dict[str, dict[str, tuple[float, float]]], copy: float) -> list[Row]:
    """Print a line per pass, and return the rows for the table of results."""
    rows = []
    for way, aim in AIMS.items():
        parts = {name: passes[way][1] / copy for name, passes in found.items()}
        cells = " ".join(f"{name} {part:5.0%}" for name, part in parts.items())
        verdict = "ok" if parts["native"] >= aim else f"native below {aim:.0%}"
        print(f"{case!s:44} {way:9} of the copy's bandwidth: {cells}  {verdict}", flush=True)
        eager = found["eager"][way][0]
        rows += [
            Row(f"{name} {case} {way}", speed / GIGA, "GB/s", of_peak=speed / copy, ratio=time / eager)
            for name, passes in found.items()
            for time, speed in [passes[way]]
        ]
    return rows


def casts(settings: Settings, copy: float) -> list[Row]:
    """Casts of a bfloat16 matrix to FP8, scales included; bytes of the matrix and of the results, each once."""
    blocks = {"tensor": fp8.WHOLE, "rows": fp8.ROWS, "1 x 128": fp8.Blocks(1, 128), "128 x 128": fp8.Blocks(128, 128)}
    orders: dict[fp8.Order, int] = {"rows": 1, "columns": 1, "both": 2}
    x, rows = torch.randn(settings.elements // 8192, 8192, dtype=torch.bfloat16), []
    for (name, each), (order, written) in product(blocks.items(), orders.items()):
        speeds = []
        for backend in ("native", "reference"):
            work = partial(fp8.quantise, x, fp8.E4M3, each, power_of_two=True, order=order, backend=backend)
            speeds.append((size([x]) + written * x.numel()) / seconds(work, settings.repeats))
        label = f"FP8 by {name}, order {order}"
        print(f"{label:44} of the copy's bandwidth: native {speeds[0] / copy:5.0%} eager {speeds[1] / copy:5.0%}")
        rows.append(Row(label, speeds[0] / GIGA, "GB/s", of_peak=speeds[0] / copy, ratio=speeds[1] / speeds[0]))
    return rows


def main(settings: Settings) -> int:
    """Measure every case and print the table."""
    if not torch.cuda.is_available():
        print("bench_ops_gpu needs a GPU, and torch sees none; python -m benchmarks.bench_ops is for CPUs")
        return 1
    torch.set_default_device("cuda")
    device = torch.cuda.get_device_name()
    copy = copy_bandwidth(settings.repeats)
    print(f"{device}: a copy moves {copy / GIGA:,.0f} GB/s")
    rows = [Row("copy of 1 GiB", copy / GIGA, "GB/s", of_peak=1.0)]
    for op in settings.ops:
        for columns in settings.columns:
            for dtype in (getattr(torch, name) for name in settings.dtypes):
                case = Case(op, (settings.elements // columns, columns), dtype, threads=1)
                found = {name: measure(case, name, settings.repeats) for name in names_of(case)}
                rows += report(case, found, copy)
    rows += casts(settings, copy)
    if settings.keep:
        append("bench_ops_gpu", rows, device=device)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
