"""Time and memory of the output layer and the loss, forward and backward, with and without whole logits, on the CPU.

Each contender runs in a separate process. Memory is the process's peak in addition to hidden states, weight and main
gradient. Prints a table and appends it to benchmarks/results.csv; ``ratio`` there is the time relative to torch eager.

python -m benchmarks.bench_loss
"""

from __future__ import annotations

import os
import re
import statistics
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from multiprocessing import get_context
from pathlib import Path

import torch
import tyro
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.results import Row, append
from megatron_core.features.output_losses.chunked_loss import linear_cross_entropy
from megatron_core.ops import Backend
from megatron_core.parallel.groups import LocalGroup
from megatron_core.tensor_parallel import vocab_parallel_cross_entropy
from megatron_core.tensor_parallel.linear import parallel_linear

Losses = Callable[[Tensor, nn.Parameter, Tensor], Tensor]


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Measure time and memory of the output layer and the loss."""

    tokens: int = 2048
    """Tokens of a micro-batch."""
    vocabulary: int = 32000
    """Vocabulary size."""
    hidden: int = 512
    """Width of the hidden states."""
    dtype: str = "bfloat16"
    """Data type of hidden states and weight; the main gradient is float32."""
    pieces_mib: tuple[int, ...] = (8, 32, 64)
    """Maximum sizes of logits in MiB, for the fused layer and loss."""
    threads: int = 2
    """Threads of each process."""
    rounds: int = 3
    """Number of rounds."""
    keep: bool = True
    """Append to benchmarks/results.csv."""


def eager(hidden: Tensor, weight: nn.Parameter, target: Tensor) -> Tensor:
    """The usual PyTorch code."""
    return functional.cross_entropy(functional.linear(hidden, weight).float(), target, reduction="none")


def whole(hidden: Tensor, weight: nn.Parameter, target: Tensor, *, backend: Backend) -> Tensor:
    """The layer, then the loss, whose gradient overwrites the logits."""
    logits = parallel_linear(hidden, weight, None)
    return vocab_parallel_cross_entropy(logits, target, tp_group=LocalGroup(), overwrite_logits=True, backend=backend)


def contenders(settings: Settings) -> dict[str, Losses]:
    """The contenders by name."""
    found: dict[str, Losses] = {"eager": eager}
    found |= {f"whole logits, {backend}": partial(whole, backend=backend) for backend in ("reference", "native")}
    for mib in settings.pieces_mib:
        found[f"fused, {mib} MiB"] = partial(linear_cross_entropy, max_logit_bytes=mib * 2**20, backend="native")
    return found


def status(entry: str) -> int:
    """Bytes of an entry of this process's status: VmRSS now, VmHWM at the peak."""
    return int(re.search(rf"{entry}:\s*(\d+) kB", Path("/proc/self/status").read_text())[1]) * 1024


def step(losses: Losses, tokens: int, settings: Settings) -> tuple[float, int]:
    """Seconds and peak bytes of one forward and backward."""
    dtype = getattr(torch, settings.dtype)
    hidden = torch.randn(tokens, settings.hidden).to(dtype).requires_grad_()
    weight = nn.Parameter(torch.randn(settings.vocabulary, settings.hidden).div_(settings.hidden**0.5).to(dtype))
    if losses is not eager:
        weight.main_grad = torch.zeros(weight.shape).fill_(0.0)
    target = torch.randint(settings.vocabulary, (tokens,))
    Path("/proc/self/clear_refs").write_text("5")  # reset the peak
    before, began = status("VmRSS"), time.perf_counter()
    losses(hidden, weight, target).mean().backward()
    return time.perf_counter() - began, status("VmHWM") - before


def measure(name: str, settings: Settings) -> tuple[float, int]:
    """In a new process: a small step for lazy initialization, then the measured one."""
    torch.set_num_threads(settings.threads)
    losses = contenders(settings)[name]
    step(losses, 16, settings)
    return step(losses, settings.tokens, settings)


def main(settings: Settings) -> None:
    """Measure all contenders alternately, print, append."""
    # With this setting glibc returns freed memory immediately; otherwise free memory would count.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"
    names, found = list(contenders(settings)), {}
    for _ in range(settings.rounds):
        for name in names:
            with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
                found.setdefault(name, []).append(pool.submit(measure, name, settings).result())
    rows = []
    seconds = {name: statistics.median(second for second, _ in turns) for name, turns in found.items()}
    for name, turns in found.items():
        memory, ratio = max(peak for _, peak in turns), seconds[name] / seconds["eager"]
        print(f"{name:24}{seconds[name]:8.2f} s{ratio:8.2f} of eager{memory / 2**20:9.0f} MiB", flush=True)
        shape = f"{settings.tokens}x{settings.hidden}x{settings.vocabulary} {settings.dtype}"
        rows.append(Row(f"{name} {shape}", seconds[name], "s", memory_bytes=memory, ratio=ratio))
    if settings.keep:
        append("bench_loss", rows)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
