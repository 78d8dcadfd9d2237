"""Compare training losses in each FP8 recipe with bfloat16, on the source text of Python's library, on the CPU.

The same small GPT, weights, batches and steps; bytes are tokens. Prints a table, draws docs/images/fp8_loss.png and
appends to benchmarks/results.csv; ``ratio`` there is the loss over the last steps relative to bfloat16.

python -m benchmarks.bench_fp8_loss
"""

from __future__ import annotations

import statistics
import sysconfig
import time
from collections.abc import Mapping
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from multiprocessing import get_context
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
import torch
import tyro

from benchmarks.bench_fp8_gpu import RUNS
from benchmarks.results import Row, append
from megatron_core.config import RunConfig
from megatron_core.datasets.base import Sample
from megatron_core.parallel import World
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "images" / "fp8_loss.png"


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the losses of the recipes."""

    steps: int = 300
    """Number of optimizer steps."""
    layers: int = 2
    """Layers of the model."""
    hidden: int = 128
    """Width of the model."""
    length: int = 64
    """Tokens of a sequence."""
    batch: int = 4
    """Sequences per step."""
    lr: float = 1e-3
    """Highest learning rate."""
    last: int = 50
    """Number of steps at the end over which losses are averaged."""
    processes: int = 2
    """Number of parallel runs, each on one thread."""
    keep: bool = True
    """Draw the picture and append to benchmarks/results.csv."""


@cache
def text() -> np.ndarray:
    """The modules of Python's library, concatenated, as bytes."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    return np.frombuffer(b"\n".join(file.read_bytes() for file in files), dtype=np.uint8)


@dataclass(frozen=True)
class Windows:
    """Pieces of ``text`` at positions that depend only on their number."""

    sequence_length: int

    def __getitem__(self, index: int) -> Sample:
        start = int(np.random.default_rng(index).integers(len(text()) - self.sequence_length))
        tokens = text()[start : start + self.sequence_length + 1].astype(np.int64)
        return Sample(tokens=tokens[:-1], labels=tokens[1:], loss_mask=np.ones(self.sequence_length, dtype=np.float32))


def configuration(settings: Settings, own: Mapping[str, object]) -> RunConfig:
    """The model and its training, with a run's ``own`` settings."""
    shared = {
        "num_layers": settings.layers,
        "hidden_size": settings.hidden,
        "num_attention_heads": 4,
        "swiglu": True,
        "ffn_hidden_size": 2 * settings.hidden,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "disable_bias_linear": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "seq_length": settings.length,
        "vocab_size": 256,
        "mock_data": True,
        "micro_batch_size": settings.batch,
        "global_batch_size": settings.batch,
        "train_iters": settings.steps,
        "lr": settings.lr,
        "lr_decay_style": "cosine",
        "lr_warmup_iters": settings.steps // 20,
        "bf16": True,
    }
    return RunConfig.from_flat(shared | dict(own))


def losses(settings: Settings, name: str) -> tuple[list[float], float]:
    """The loss of each step of a run, and its duration in seconds."""
    torch.set_num_threads(1)
    config = configuration(settings, RUNS[name])
    run = set_up(config, World(0, 1, local_rank=0, device=torch.device("cpu")))
    run.train_loader = run.loader(Windows(settings.length))
    began = time.perf_counter()
    found = [train_step(run).loss for _ in range(settings.steps)]
    return found, time.perf_counter() - began


def draw(found: Mapping[str, list[float]], path: Path) -> None:
    """Plot the curves, and below them their differences from bfloat16, as means over a tenth of the steps."""
    plain = np.array(found["bf16"])
    width = max(len(plain) // 10, 1)
    figure, (upper, lower) = plt.subplots(2, 1, sharex=True, figsize=(8, 6), height_ratios=(2, 1))
    window = np.ones(width) / width
    for name, values in found.items():
        mean = np.convolve(values, window, "valid")
        steps = np.arange(len(mean)) + width
        upper.plot(steps, mean, label=name, linewidth=1.2)
        lower.plot(steps, 100.0 * (mean / np.convolve(plain, window, "valid") - 1.0), linewidth=1.2)
    for bound in (-0.5, 0.5):
        lower.axhline(bound, color="#6b7280", linewidth=0.8, linestyle=":")
    upper.set_ylabel("loss")
    upper.legend(frameon=False)
    lower.set_ylabel("difference from bf16, %")
    lower.set_xlabel(f"step (means over {width})")
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main(settings: Settings) -> None:
    """Train every run, and compare."""
    with ProcessPoolExecutor(settings.processes, mp_context=get_context("spawn")) as pool:
        futures = {name: pool.submit(losses, settings, name) for name in RUNS}
        done = {name: future.result() for name, future in futures.items()}
    found = {name: curve for name, (curve, _) in done.items()}
    ends = {name: statistics.fmean(curve[-settings.last :]) for name, curve in found.items()}
    print(f"{'run':20} {'loss':>8} {'to bf16':>9} {'s/step':>8}")
    for name, end in ends.items():
        print(f"{name:20} {end:8.4f} {end / ends['bf16'] - 1.0:+9.3%} {done[name][1] / settings.steps:8.3f}")
    if settings.keep:
        draw(found, PICTURE)
        append("fp8_loss", [Row(name, end, "nats", ratio=end / ends["bf16"]) for name, end in ends.items()])


if __name__ == "__main__":
    main(tyro.cli(Settings))
