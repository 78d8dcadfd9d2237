"""Time whole training steps with the native kernels and with the reference, on one CPU thread.

Both run alternately in one process, and their median steps are compared. Prints a table and appends it to
benchmarks/results.csv; ``ratio`` there is the time relative to the reference.

python -m benchmarks.bench_backends
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
import tyro

from benchmarks.results import Row, append
from benchmarks.steps import SHAPE, Measured, Turn, time_steps
from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks

MODELS: dict[str, dict[str, object]] = {
    "GPT": {"openai_gelu": False},
    "GPT with dropout": {"openai_gelu": False, "hidden_dropout": 0.1},
    "GPT with dropout, attention unfused": {
        "openai_gelu": False,
        "hidden_dropout": 0.1,
        "attention_dropout": 0.1,
        "attention_backend": "unfused",
    },
    "Llama": {
        "openai_gelu": False,
        "normalization": "RMSNorm",
        "swiglu": True,
        "position_embedding_type": "rope",
        "disable_bias_linear": True,
    },
}
DTYPES: dict[str, dict[str, object]] = {"float32": {}, "bfloat16": {"bf16": True}}
BACKENDS = ("native", "reference")
GLOBAL_BATCH_SIZE = 8


def steps_of(flags: dict[str, object], steps: int) -> Turn:
    """Time the steps of a run."""
    world = World(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))

    def make() -> Callable[[], object]:
        run = set_up(RunConfig.from_flat(SHAPE | {"global_batch_size": GLOBAL_BATCH_SIZE} | flags), world)
        return lambda: train_step(run)

    return time_steps(make, steps)


def compare(flags: dict[str, object], rounds: int, steps: int) -> dict[str, Measured]:
    """Both backends, alternately."""
    found = {name: Measured(1, GLOBAL_BATCH_SIZE * SHAPE["seq_length"]) for name in BACKENDS}
    for _ in range(rounds):
        for name, entry in found.items():
            entry.add(run_ranks(1, steps_of, flags | {"kernel_backend": name}, steps, timeout=600.0))
    return found


def main(rounds: int = 3, steps: int = 3) -> None:
    """Time whole training steps.

    Args:
        rounds: Number of rounds; each backend runs once per round.
        steps: Timed steps per round, after one warm-up step.
    """
    print(f"{'tokens/s, MiB':46}{'native':>14}{'reference':>14}{'time':>7}")
    for model, model_flags in MODELS.items():
        for dtype, dtype_flags in DTYPES.items():
            found = compare(model_flags | dtype_flags, rounds, steps)
            rates = {name: entry.tokens_per_second for name, entry in found.items()}
            times = {name: rates["reference"] / rate for name, rate in rates.items()}
            cells = (f"{rates[name]:7.0f}{entry.memory / 2**20:7.0f}" for name, entry in found.items())
            print(f"{f'{model}, {dtype}':46}", *cells, f"{times['native']:6.2f}", sep="", flush=True)
            rows = [
                Row(f"{model} {dtype} {name}", rates[name], "tokens/s", None, entry.memory, times[name])
                for name, entry in found.items()
            ]
            append("bench_backends", rows)


if __name__ == "__main__":
    sys.exit(tyro.cli(main, description=__doc__))
