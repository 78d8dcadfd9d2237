"""Compare ``megatron_core.fully_shard`` with torch's, in the same program, on two ranks.

A GPT-2 of torch's modules with AdamW and clipping; both start with gloo. One thread per rank; the contenders alternate,
and medians over all steps are compared. Prints seconds and processor seconds of a step, the peak memory of a rank, and
the ratio of the times; ``--record`` appends them to benchmarks/results.csv.

python -m benchmarks.bench_fully_shard
"""

from __future__ import annotations

import statistics
import sys
import time
from dataclasses import dataclass

import torch
import torch.distributed as dist
import tyro
from torch import nn
from torch.distributed import fsdp

import megatron_core
from benchmarks.results import Row, append
from benchmarks.torch_peers import TorchGPT, batches_of, cross_entropy
from megatron_core.monitor.device import peak_memory_bytes
from megatron_core.verify.ranks import run_ranks

CONTENDERS = {"torch": fsdp.fully_shard, "megatron_core": megatron_core.fully_shard}
WARM_UP = 2


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the times of training steps on two ranks."""

    rounds: int = 3
    """Number of rounds."""
    steps: int = 6
    """Timed steps per round, after two warm-up steps."""
    layers: int = 6
    """Layers of the model."""
    hidden_size: int = 256
    """Width of the model."""
    seq_length: int = 128
    """Tokens of a sequence."""
    micro_batch_size: int = 2
    """Sequences of a rank in a step."""
    vocab_size: int = 2048
    """Size of the vocabulary."""
    record: bool = False
    """Append the figures to benchmarks/results.csv; only on a machine without other work."""


Turn = tuple[list[float], float, int]
"""Seconds of each step, mean processor seconds of a step, and the increase of the peak memory."""


def time_steps(name: str, settings: Settings) -> Turn:
    """Train on one rank with the ``fully_shard`` of ``name``."""
    before = peak_memory_bytes()
    shape = vars(settings) | {"num_attention_heads": 4}
    torch.manual_seed(0)
    model = TorchGPT(shape, settings.layers)
    for layer in model.layers:
        CONTENDERS[name](layer)
    CONTENDERS[name](model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    (tokens,) = batches_of(shape, 1)
    seconds = []
    processor = 0.0
    for number in range(WARM_UP + settings.steps):
        dist.barrier()
        began = time.perf_counter()
        processor_began = time.process_time()
        cross_entropy(model(tokens), tokens).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if number >= WARM_UP:
            seconds.append(time.perf_counter() - began)
            processor += time.process_time() - processor_began
    return seconds, processor / settings.steps, peak_memory_bytes() - before


def main() -> int:
    """Measure, print, and append on request."""
    settings = tyro.cli(Settings, description=__doc__)
    turns: dict[str, list[Turn]] = {name: [] for name in CONTENDERS}
    for _ in range(settings.rounds):
        for name in CONTENDERS:
            turns[name] += run_ranks(2, time_steps, name, settings, timeout=300.0, backend="gloo")
    seconds = {name: statistics.median(step for turn in turns[name] for step in turn[0]) for name in turns}
    processor = {name: statistics.median(turn[1] for turn in turns[name]) for name in turns}
    memory = {name: max(turn[2] for turn in turns[name]) for name in turns}
    print(f"{'':14}{'ms a step':>10}{'processor ms':>14}{'MiB a rank':>12}{'times as fast':>15}{'(processor)':>13}")
    rows = []
    for name in CONTENDERS:
        ratio = seconds["torch"] / seconds[name]
        processor_ratio = processor["torch"] / processor[name]
        times = f"{1000 * seconds[name]:10.0f}{1000 * processor[name]:14.0f}"
        print(f"{name:14}{times}{memory[name] / 2**20:12.0f}{ratio:15.2f}{processor_ratio:13.2f}")
        rows.append(Row(name, seconds[name], "s", None, memory[name], ratio))
        rows.append(Row(f"{name}, processor time", processor[name], "s", None, None, processor_ratio))
    if settings.record:
        append("bench_fully_shard", rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
