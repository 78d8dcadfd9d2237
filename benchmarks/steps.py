"""Training steps of this framework that several benchmarks time: shapes, layouts and clocks."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from megatron_core.config import RunConfig
from megatron_core.monitor.device import peak_memory_bytes
from megatron_core.parallel import World
from megatron_core.reports.measurements import Measurements
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step

SHAPE: dict[str, Any] = {
    "num_layers": 8,
    "hidden_size": 256,
    "num_attention_heads": 8,
    "seq_length": 256,
    "vocab_size": 8192,
    "micro_batch_size": 2,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "openai_gelu": True,
    "mock_data": True,
    "train_iters": 1000,
    "lr": 1e-3,
}
"""A GPT-2."""
LLAMA: dict[str, Any] = {key: value for key, value in SHAPE.items() if key != "openai_gelu"} | {
    "position_embedding_type": "rope",
    "normalization": "RMSNorm",
    "swiglu": True,
    "ffn_hidden_size": 704,
    "disable_bias_linear": True,
    "untie_embeddings_and_output_weights": True,
}
MIXTRAL: dict[str, Any] = LLAMA | {
    "num_layers": 4,
    "num_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 512,
    "moe_router_load_balancing_type": "none",
}


@dataclass
class Turn:
    """Steps of one rank in one round."""

    seconds: list[float]
    """Wall-clock time of each step."""
    processor: list[float]
    """Processor time of each step: user and system time of all threads of the process."""
    memory: int
    """Peak memory of the process in bytes."""
    growth: int
    """Increase of the peak memory by setup and steps."""
    monitoring: float = 0.0
    """Processor time of monitoring per step; it is part of ``processor``."""


@dataclass
class Measured:
    """All rounds of a contender."""

    world_size: int
    tokens: int
    """Tokens per step of all ranks."""
    seconds: list[float] = field(default_factory=list)
    """Wall-clock time of each step, of the slowest rank."""
    processor: list[float] = field(default_factory=list)
    """Processor time of each step, the sum over ranks."""
    memory: int = 0
    monitoring: float = 0.0

    def add(self, ranks: list[Turn]) -> None:
        """Add a round."""
        self.seconds += map(max, zip(*(turn.seconds for turn in ranks), strict=True))
        self.processor += map(sum, zip(*(turn.processor for turn in ranks), strict=True))
        self.memory = max(self.memory, *(turn.memory for turn in ranks))
        self.monitoring = max(self.monitoring, *(turn.monitoring for turn in ranks))

    @property
    def tokens_per_second(self) -> float:
        """Tokens per second of all ranks, at the median step."""
        return self.tokens / statistics.median(self.seconds)


def time_steps(make: Callable[[], Callable[[], object]], steps: int) -> Turn:
    """Set up, run a warm-up step, and time the next steps."""
    before = peak_memory_bytes()
    step = make()
    step()
    seconds, processor = [], []
    for _ in range(steps):
        began, spent = time.perf_counter(), time.process_time()
        step()
        seconds.append(time.perf_counter() - began)
        processor.append(time.process_time() - spent)
    peak = peak_memory_bytes()
    return Turn(seconds, processor, peak, peak - before)


def time_run(flags: Mapping[str, Any], steps: int) -> Turn:
    """Time steps of one rank of this framework, with monitoring as in ``pretrain_gpt.py``."""
    world = World(dist.get_rank(), dist.get_world_size(), 0, torch.device("cpu"))
    watching: list[float] = []
    with tempfile.TemporaryDirectory() as folder:

        def make() -> Callable[[], object]:
            run = set_up(RunConfig.from_flat({**flags, "save": folder}), world)
            measurements = Measurements(run)
            measurements.before_run()

            def step() -> None:
                result = train_step(run)
                began = time.process_time()
                measurements.of_step(result)
                watching.append(time.process_time() - began)

            return step

        turn = time_steps(make, steps)
    turn.monitoring = statistics.median(watching)
    return turn
