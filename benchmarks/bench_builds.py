"""Time whole training steps with several builds of the CPU library, on one thread, to measure specialisations.

The builds of one model alternate step by step in one process, forwards and backwards (A B C C B A), and each step is
compared with the first build's of the same round by CPU time; medians of the rounds. ``step`` is the ratio of whole
steps, which includes the noise of the matrix products. ``kernels`` measures only the native calls: 1 + their difference
/ whole step, also for the first and the second half of the rounds. Give the first build twice to see the noise. Appends
the latter to benchmarks/results.csv.

python -m benchmarks.bench_builds --builds a.so copy_of_a.so b.so
"""

from __future__ import annotations

import ctypes
import statistics
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import tyro

from benchmarks.bench_backends import DTYPES, MODELS
from benchmarks.results import Row, append
from benchmarks.steps import SHAPE
from megatron_core.config import RunConfig
from megatron_core.ops import native
from megatron_core.parallel import World
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks

LARGE: dict[str, object] = {"hidden_size": 1024, "seq_length": 1024, "micro_batch_size": 1}
"""Models with activations of 4 MiB and more, which do not fit into a cache."""


class Timer:
    """``native.call``, measuring its CPU time."""

    def __init__(self) -> None:
        self.seconds, self._call = 0.0, native.call

    def __call__(self, *arguments: object) -> None:
        began = time.thread_time()
        self._call(*arguments)
        self.seconds += time.thread_time() - began


def in_turns(flags: dict[str, object], builds: tuple[Path, ...], rounds: int) -> list[list[tuple[float, float]]]:
    """CPU seconds of a step and of its native calls, by round and build."""
    world = World(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))
    shape = SHAPE | flags
    run = set_up(RunConfig.from_flat(shape | {"global_batch_size": shape["micro_batch_size"]}), world)
    libraries = [ctypes.CDLL(str(build.resolve())) for build in builds]
    native.call = timer = Timer()
    train_step(run)
    found = []
    for number in range(rounds):
        seconds = [(0.0, 0.0)] * len(builds)
        for i in range(len(builds)) if number % 2 == 0 else reversed(range(len(builds))):
            native.library = lambda device_type, dtype, loaded=libraries[i]: loaded
            began, timer.seconds = time.process_time(), 0.0
            train_step(run)
            seconds[i] = time.process_time() - began, timer.seconds
        found.append(seconds)
    return found


def main(
    builds: tuple[Path, ...],
    rounds: int = 30,
    models: tuple[str, ...] = ("GPT", "Llama"),
    dtypes: tuple[str, ...] = tuple(DTYPES),
    layers: int = 8,
    large: bool = False,
) -> None:
    """Compare builds.

    Args:
        builds: Paths of CPU libraries, the reference build first.
        rounds: Steps of each build.
        models: Models of benchmarks/bench_backends.py.
        dtypes: Dtypes of benchmarks/bench_backends.py.
        layers: Layers of the model.
        large: Width 1024 and sequences of 1024 instead of 256 and 256.
    """
    print(f"{'':26}{'kernels, share':>16}", *(f"{build.stem + ': step, kernels':>36}" for build in builds[1:]), sep="")
    for model in models:
        for dtype in dtypes:
            flags = MODELS[model] | DTYPES[dtype] | {"num_layers": layers} | (LARGE if large else {})
            found = run_ranks(1, in_turns, flags, builds, rounds, timeout=3600.0)[0]
            name = f"{model} {dtype}{' large' if large else ''}"
            step, share = (statistics.median(part) for part in zip(*((w, k / w) for (w, k), *_ in found), strict=True))
            print(f"{name:26}{share:16.3f}", end="")
            rows = [Row(f"{name} {builds[0].stem}", step, "s", share)]
            for i, build in enumerate(builds[1:], 1):
                steps = [seconds[i][0] / seconds[0][0] for seconds in found]
                kernels = [1 + (seconds[i][1] - seconds[0][1]) / step for seconds in found]
                parts = steps, kernels, kernels[: rounds // 2], kernels[rounds // 2 :]
                print(" " * 8, *(f"{statistics.median(part):7.3f}" for part in parts), sep="", end="", flush=True)
                rows.append(Row(f"{name} {build.stem}", step, "s", share, ratio=statistics.median(kernels)))
            print()
            append("bench_builds", rows)


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
