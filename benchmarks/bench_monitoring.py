"""Cost of recording times and memory, as CPU time of each part, which other programs do not affect.

python -m benchmarks.bench_monitoring
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from statistics import median

import torch

from megatron_core.config import RunConfig
from megatron_core.parallel import ParallelGroups, World
from megatron_core.reports.measurements import Measurements
from megatron_core.reports.meter import Meter
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step

MODEL = {
    "num_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "seq_length": 256, "vocab_size": 2048,
    "mock_data": True, "micro_batch_size": 1, "global_batch_size": 4, "train_iters": 20, "eval_iters": 0,
}  # fmt: skip
STEPS, CALLS = 12, 20_000
COLLECTIVES = 4 * 4 * 4 + 12
"""Collectives per step of this model with tensor parallelism: 4 per layer and micro-batch, and those of the step."""


def cost_of_collective() -> float:
    """CPU seconds to charge and sum up a collective."""
    meter, call = Meter(), partial(int, 0)
    meter.start(ParallelGroups.single(), torch.device("cpu"))
    began = time.thread_time()
    for _ in range(CALLS):
        meter.run("all_reduce", None, 1.0, call)
    meter.take()
    return (time.thread_time() - began) / CALLS


def main() -> None:
    """Measure and print."""
    steps, watching = [], []
    with tempfile.TemporaryDirectory() as folder:
        run = set_up(RunConfig.from_flat(MODEL | {"save": folder}), World(0, 1, 0, torch.device("cpu")))
        measurements = Measurements(run)
        measurements.before_run()
        for _ in range(STEPS):
            began = time.thread_time()
            result = train_step(run)
            middle = time.thread_time()
            measurements.of_step(result)
            steps.append(middle - began)
            watching.append(time.thread_time() - middle)
        measurements.after_run()
        measurements.close()
    each, once, step = cost_of_collective(), median(watching), median(steps)
    print(f"a collective {1e6 * each:.2f} us; after a step {1e6 * once:.0f} us; a step {1e3 * step:.1f} ms")
    print(f"with {COLLECTIVES} collectives: {(once + COLLECTIVES * each) / step:.2%} of a step")


if __name__ == "__main__":
    main()
