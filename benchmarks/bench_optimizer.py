"""Compare the native kernels of AdamW, gradient norm and clipping with torch's fused and foreach ones.

Float32 main weights with moments, gradients and a bfloat16 copy of the weights, in several flat tensors. In every round
each contender runs several calls after a warm-up call, and medians over all rounds are compared. Prints milliseconds,
the ratio to the peer of the same work, and the bandwidth of the minimal traffic relative to a measured copy. Appends to
benchmarks/results.csv; ``ratio`` there is the time relative to the peer.

python -m benchmarks.bench_optimizer
"""

from __future__ import annotations

import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import tyro
from torch import Tensor

from benchmarks.results import Row, append
from megatron_core.ops import adamw_, scale_, squared_norm

RATES = {"lr": 1e-4, "betas": (0.9, 0.95), "weight_decay": 0.1}
EPSILON = 1e-8
LIMIT = 1.0
"""Arguments of torch's own clipping."""


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the times of the optimizer's operations."""

    parameters: int = 20_000_000
    """Total number of elements of the weights."""
    tensors: int = 5
    """Number of flat tensors."""
    threads: tuple[int, ...] = (1, 2)
    """Threads that torch and the native kernels may use."""
    device: str = "cpu"
    """Device of the tensors, by torch's names."""
    rounds: int = 8
    """Number of rounds."""
    calls: int = 3
    """Timed calls per round."""
    keep: bool = True
    """Append to benchmarks/results.csv."""


@dataclass(frozen=True)
class Work:
    """Work done by several contenders."""

    name: str
    bytes_each: int
    """Bytes that must be moved per parameter."""
    peer: str
    """The contender used as reference."""
    contenders: dict[str, Callable[[], object]]


@dataclass
class Problem:
    """Weights, copies, gradients and moments."""

    settings: Settings
    steps: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        self.weights, self.grads, self.means = self._drawn(), self._drawn(), self._drawn()
        self.squares = [mean.square() for mean in self.means]
        self.copies = [weight.bfloat16() for weight in self.weights]

    def _drawn(self) -> list[Tensor]:
        size = self.settings.parameters // self.settings.tensors
        return [torch.randn(size, device=self.settings.device) for _ in range(self.settings.tensors)]

    def native_step(self, factor: float = 1.0) -> None:
        """One contender."""
        self.steps += 1
        lists = (self.grads, self.weights, self.means, self.squares, self.copies)
        adamw_(*lists, step=self.steps, epsilon=EPSILON, factor=factor, backend="native", **RATES)

    def torch_step(self, **kind: bool) -> Callable[[], None]:
        """torch.optim.AdamW, and the copies after it."""
        weights = [weight.clone() for weight in self.weights]
        adam = torch.optim.AdamW(weights, eps=EPSILON, **RATES, **kind)

        def step() -> None:
            for weight, grad in zip(weights, self.grads, strict=True):
                weight.grad = grad
            adam.step()
            torch._foreach_copy_(self.copies, weights)

        return step

    def native_clip(self) -> None:
        """Norm and multiplication; unlike torch's, the host waits for the norm."""
        scale_(self.grads, self.clip_factor(), backend="native")

    def clip_factor(self) -> float:
        """Continue with the norm."""
        return LIMIT / (squared_norm(self.grads, backend="native").sqrt().item() + 1e-6)

    def torch_clip(self) -> None:
        """The same with torch."""
        torch.nn.utils.clip_grad_norm_(self.weights, LIMIT, foreach=True)

    def works(self) -> list[Work]:
        """All contenders."""
        for weight, grad in zip(self.weights, self.grads, strict=True):
            weight.grad = grad
        targets = [torch.empty_like(weight) for weight in self.weights]
        fused = self.torch_step(fused=True)
        steps = {"native": self.native_step, "fused": fused}
        clipped = {
            "native": lambda: self.native_step(self.clip_factor()),
            "fused": lambda: (self.torch_clip(), fused()),
        }
        norms = {
            "native": lambda: squared_norm(self.grads, backend="native"),
            "foreach": lambda: torch.nn.utils.get_total_norm(self.grads, foreach=True),
        }
        return [
            Work("copy", 8, "torch", {"torch": lambda: torch._foreach_copy_(targets, self.grads)}),
            Work("adamw", 30, "fused", steps | {"foreach": self.torch_step(foreach=True)}),
            Work("norm", 4, "foreach", norms),
            Work("norm and clip", 12, "foreach", {"native": self.native_clip, "foreach": self.torch_clip}),
            Work("clipped step", 34, "fused", clipped),
        ]


def measure(works: list[Work], settings: Settings) -> dict[tuple[str, str], float]:
    """Median seconds by (work, contender)."""
    times: dict[tuple[str, str], list[float]] = defaultdict(list)
    for _ in range(settings.rounds):
        for work in works:
            for name, function in work.contenders.items():
                times[work.name, name] += seconds(function, settings)
    return {key: statistics.median(values) for key, values in times.items()}


def seconds(function: Callable[[], object], settings: Settings) -> list[float]:
    """Time of each call, after a warm-up call that allocates memory and fills caches."""
    times = []
    for _ in range(settings.calls + 1):
        start = time.perf_counter()
        function()
        if settings.device != "cpu":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times[1:]


def report(works: list[Work], times: dict[tuple[str, str], float], settings: Settings, threads: int) -> list[Row]:
    """Print a line per contender, and return the rows for the table of results."""
    rows = []
    copy_rate = 8 * settings.parameters / times["copy", "torch"]
    for work in works:
        for name in work.contenders:
            took = times[work.name, name]
            ratio, rate = took / times[work.name, work.peer], work.bytes_each * settings.parameters / took
            where = f"{threads}t" if settings.device == "cpu" else settings.device
            cells = f"{took * 1e3:9.2f} {ratio:7.2f} {rate / 1e9:9.1f} {rate / copy_rate:8.2f}"
            print(f"{work.name:14} {where:5} {name:8} {cells}", flush=True)
            label = f"{name} {work.name} {settings.parameters} {where}"
            rows.append(Row(label, took, "s", of_peak=rate / copy_rate, ratio=ratio))
    return rows


def main(settings: Settings) -> None:
    """Time everything and print the table."""
    print(f"{'':29} {'ms':>9} {'ratio':>7} {'GB/s':>9} {'of copy':>8}")
    for threads in settings.threads if settings.device == "cpu" else (1,):
        torch.set_num_threads(threads)
        works = Problem(settings).works()
        rows = report(works, measure(works, settings), settings, threads)
        if settings.keep:
            device = None if settings.device == "cpu" else torch.cuda.get_device_name()
            append("bench_optimizer", rows, device=device)


if __name__ == "__main__":
    main(tyro.cli(Settings, description=__doc__))
