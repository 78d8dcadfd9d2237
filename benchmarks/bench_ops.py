"""Compare the native kernels of the fused operations with torch eager and torch.compile, forward and backward, on the
CPU.

In every round each contender runs several calls after a warm-up call, and medians over all rounds are compared. The
order of contenders is random in each round, because it affects the caches. Prints a table and appends it to
benchmarks/results.csv; ``ratio`` there is the time relative to torch eager.

Calls use several sets of equal tensors in turn, and each set keeps its results until its next turn, as a model's layers
do until backward: inputs were written long before, outputs are written to other memory than in the previous call, and
tensors of a few MiB do not stay in the caches between calls, as they would in a loop over one set. ``--sets 1`` is such
a loop.

python -m benchmarks.bench_ops
"""

from __future__ import annotations

import ctypes
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import tyro
from torch import Tensor

from benchmarks.op_cases import CASES
from benchmarks.results import Row, append

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
CONTENDERS = ("eager", "compiled", "native")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the times of fused operations."""

    ops: tuple[str, ...] = tuple(CASES)
    """Operations to time."""
    shapes: tuple[str, ...] = ("2048x1024", "512x4096")
    """Rows x columns."""
    dtypes: tuple[str, ...] = ("float32", "bfloat16")
    """Data types, by torch's names."""
    threads: tuple[int, ...] = (1, 2)
    """Threads that torch and the native kernels may use."""
    rounds: int = 12
    """Number of rounds."""
    calls: int = 5
    """Timed calls per round."""
    sets: int = 6
    """Sets of tensors that calls use in turn; with 1 a call finds the previous call's data in the caches."""
    compiled: bool = True
    """Also time torch.compile, which takes some seconds to compile each case."""
    keep: bool = True
    """Append to benchmarks/results.csv."""


@dataclass(frozen=True)
class Case:
    """One operation with tensors of one size and dtype."""

    op: str
    shape: tuple[int, int]
    dtype: torch.dtype
    threads: int
    sets: int = 1

    def __str__(self) -> str:
        rows, columns = self.shape
        name = f"{self.op} {rows}x{columns} {str(self.dtype).removeprefix('torch.')} {self.threads}t"
        return name if self.sets == 1 else f"{name} {self.sets} sets"


def contender(case: Case, name: str) -> Callable:
    """The function that takes the case's tensors."""
    if name not in ("eager", "compiled"):
        return partial(CASES[case.op].function, backend=name)
    plain = CASES[case.op].eager or partial(CASES[case.op].function, backend="reference")
    torch.compiler.reset()  # previous compilations for other shapes would count as recompilations
    return torch.compile(plain, dynamic=False) if name == "compiled" else plain


def seconds(works: list[Callable[[], object]], calls: int) -> list[float]:
    """Time of each call, after a warm-up call; the sets are used in turn, and each result is kept until the set's next
    turn."""
    times, results = [], [None] * len(works)
    for call in range(calls + 1):
        turn = call % len(works)
        results[turn] = None
        start = time.perf_counter()
        results[turn] = works[turn]()
        times.append(time.perf_counter() - start)
    return times[1:]


def backward(function: Callable, tensors: list[Tensor]) -> Callable[[], object]:
    """Return a function that runs the backward pass of one call, repeatedly if required."""
    outputs = as_tuple(function(*tensors))
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    grads = [torch.randn_like(y) for y in outputs]
    return partial(torch.autograd.grad, outputs, wanted, grads, retain_graph=True)


def measure(case: Case, names: tuple[str, ...], settings: Settings) -> dict[tuple[str, str], float]:
    """Median seconds by (contender, pass)."""
    torch.set_num_threads(case.threads)
    sets = [CASES[case.op].inputs(*case.shape, case.dtype) for _ in range(case.sets)]
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    functions = {name: contender(case, name) for name in names}
    order, draw = list(functions.items()), random.Random(0)
    for _ in range(settings.rounds):
        draw.shuffle(order)
        for name, function in order:
            times[name, "forward"] += seconds([partial(function, *tensors) for tensors in sets], settings.calls)
            times[name, "backward"] += seconds([backward(function, tensors) for tensors in sets], settings.calls)
    return {key: statistics.median(values) for key, values in times.items()}


def as_tuple(outputs: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """One or more outputs as a tuple."""
    return outputs if isinstance(outputs, tuple) else (outputs,)


def report(case: Case, times: dict[tuple[str, str], float]) -> list[Row]:
    """Print a line per pass, and return the rows for the table of results."""
    rows = []
    for way in ("forward", "backward"):
        eager, native = times["eager", way], times["native", way]
        cells = [f"{times[name, way] * 1e3:8.3f}" if (name, way) in times else " " * 8 for name in CONTENDERS]
        compiled = times.get(("compiled", way))
        limit = CASES[case.op].limit
        verdict = "ok" if native <= limit * eager else f"more than {limit} of eager"
        if compiled and native > compiled:
            verdict += ", slower than compiled"
        print(f"{case!s:45} {way:9}", *cells, f"{native / eager:6.2f}", f" {verdict}", flush=True)
        rows += [
            Row(f"{name} {case} {way}", times[name, way], "s", ratio=times[name, way] / eager)
            for name in CONTENDERS
            if (name, way) in times
        ]
    return rows


def keep_freed_memory() -> None:
    """Let glibc reuse freed memory, as it does in a long run.

    Otherwise it may return large blocks to the kernel and allocate them again: a call on 8 MiB then takes 2 ms instead
    of 0.4.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_TRIM_THRESHOLD, ctypes.c_int(1 << 30))
        mallopt(M_MMAP_THRESHOLD, ctypes.c_int(1 << 30))


def main(settings: Settings) -> None:
    """Time every case and print the table, in milliseconds."""
    keep_freed_memory()
    names = CONTENDERS if settings.compiled else ("eager", "native")
    print(f"{'ms':55}", *(f"{name:>8}" for name in CONTENDERS), "native/eager")
    for op in settings.ops:
        for shape in settings.shapes:
            rows, columns = map(int, shape.split("x"))
            for dtype in settings.dtypes:
                for threads in settings.threads:
                    case = Case(op, (rows, columns), getattr(torch, dtype), threads, settings.sets)
                    found = report(case, measure(case, names, settings))
                    if settings.keep:
                        append("bench_ops", found)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
