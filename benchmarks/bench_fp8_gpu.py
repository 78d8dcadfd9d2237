"""Compare layers of Llama 3 8B in each FP8 recipe with bfloat16, and their matrix products, on one GPU.

Whole training steps of a few layers: median time, TFLOP/s of the model's operations (without casts), and peak memory;
``ratio`` in benchmarks/results.csv is the speed relative to bfloat16. Then linear layers of these widths, forward and
backward with casts, and single products of FP8 matrices. The bandwidth of casts is measured in
benchmarks/bench_ops_gpu.py.

python -m benchmarks.bench_fp8_gpu
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product as pairs

import torch
import tyro
from torch import Tensor, nn

from benchmarks.results import Row, append
from megatron_core.config import RunConfig
from megatron_core.config.flops import flops_per_token
from megatron_core.features.fp8.products import FP8Products
from megatron_core.features.fp8.scaled_product import product, scaled_product_unavailable_reason
from megatron_core.features.fp8.settings import BLOCK, SMALL_BLOCK
from megatron_core.parallel import World
from megatron_core.parallel.groups import ALONE
from megatron_core.tensor_parallel.linear import parallel_linear
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step

RUNS: dict[str, dict[str, object]] = {
    "bf16": {},
    "delayed, hybrid": {"fp8_format": "hybrid", "fp8_amax_history_len": 16, "fp8_amax_compute_algo": "max"},
    "tensorwise, hybrid": {"fp8_format": "hybrid", "fp8_recipe": "tensorwise"},
    "rowwise, e4m3": {"fp8_format": "e4m3", "fp8_recipe": "rowwise"},
    "blockwise, e4m3": {"fp8_format": "e4m3", "fp8_recipe": "blockwise"},
    "mxfp8, e4m3": {"fp8_format": "e4m3", "fp8_recipe": "mxfp8"},
}
TERA = 1e12


@dataclass(frozen=True, kw_only=True)
class Settings:
    """Compare the speed of the recipes."""

    runs: tuple[str, ...] = tuple(RUNS)
    """Runs to compare; bf16 comes first."""
    layers: int = 4
    """Number of layers."""
    hidden: int = 4096
    """Width of the model."""
    ffn: int = 14336
    """Width of the MLP."""
    heads: int = 32
    """Number of attention heads; a quarter as many groups of keys and values."""
    length: int = 8192
    """Length of a sequence; a step has one."""
    vocab: int = 4096
    """Vocabulary size, small, because the output layer stays in bfloat16."""
    repeats: int = 10
    """Number of timed steps or products."""
    warm_ups: int = 3
    """Number of warm-up steps."""
    device: str = "cuda"
    """Device; cpu tests only that the script runs."""
    keep: bool = True
    """Append to benchmarks/results.csv."""


def configuration(settings: Settings, own: dict[str, object]) -> RunConfig:
    """The layers and their training, with a run's ``own`` settings."""
    shared = {
        "num_layers": settings.layers,
        "hidden_size": settings.hidden,
        "ffn_hidden_size": settings.ffn,
        "num_attention_heads": settings.heads,
        "group_query_attention": True,
        "num_query_groups": settings.heads // 4,
        "seq_length": settings.length,
        "vocab_size": settings.vocab,
        "swiglu": True,
        "normalization": "RMSNorm",
        "position_embedding_type": "rope",
        "disable_bias_linear": True,
        "untie_embeddings_and_output_weights": True,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "mock_data": True,
        "micro_batch_size": 1,
        "global_batch_size": 1,
        "train_iters": settings.warm_ups + settings.repeats,
        "bf16": True,
    }
    return RunConfig.from_flat(shared | own)


def seconds(work: Callable[[], object], settings: Settings) -> float:
    """Median time of a call, including the device's remaining work."""
    wait = torch.cuda.synchronize if settings.device == "cuda" else lambda: None
    times = []
    for _ in range(settings.warm_ups + settings.repeats):
        wait()
        began = time.perf_counter()
        work()
        wait()
        times.append(time.perf_counter() - began)
    return statistics.median(times[settings.warm_ups :])


def step(settings: Settings, own: dict[str, object]) -> tuple[float, int]:
    """Seconds per training step, and the peak memory of the GPU in bytes (0 on a CPU)."""
    on_gpu = settings.device == "cuda"
    gc.collect()  # of the previous run
    if on_gpu:
        torch.cuda.reset_peak_memory_stats()
    run = set_up(configuration(settings, own), World(0, 1, local_rank=0, device=torch.device(settings.device)))
    return seconds(partial(train_step, run), settings), torch.cuda.max_memory_allocated() if on_gpu else 0


def steps(settings: Settings) -> list[Row]:
    """Run and print training steps of every run."""
    rows: list[Row] = []
    model = configuration(settings, {}).model
    flops = settings.length * flops_per_token(model, settings.length, settings.vocab)
    for recipe, block in (("blockwise", BLOCK), ("mxfp8", SMALL_BLOCK)):
        reason = scaled_product_unavailable_reason(block, torch.device(settings.device))
        print(f"{recipe}: " + (f"dequantised matrices, because {reason}" if reason else "torch's product of blocks"))
    print(f"{settings.layers} layers of {settings.hidden}, {settings.length} tokens")
    print(f"{'run':20} {'ms/step':>9} {'TFLOP/s':>9} {'to bf16':>8} {'GiB':>6}")
    for name in settings.runs:
        time_of_step, memory = step(settings, RUNS[name])
        speed = flops / time_of_step / TERA
        ratio = speed / rows[0].value if rows else 1.0
        print(f"{name:20} {time_of_step * 1e3:9.1f} {speed:9.1f} {ratio:8.2f} {memory / 2**30:6.1f}", flush=True)
        rows.append(Row(f"{name}, step", speed, "TFLOP/s", memory_bytes=memory, ratio=ratio))
    return rows


def linear(x: Tensor, weight: nn.Parameter, grad: Tensor, fp8: FP8Products | None) -> None:
    """A linear layer, forward and backward."""
    parallel_linear(x, weight, None, products=fp8).backward(grad)


def products(settings: Settings) -> list[Row]:
    """Run and print the three products of linear layers: with casts, and a single product."""
    rows: list[Row] = []
    shapes = {"fc1": (settings.hidden, 2 * settings.ffn), "fc2": (settings.ffn, settings.hidden)}
    print(f"{'layer, run':28} {'TFLOP/s':>9} {'to bf16':>8} {'one product':>12}")
    for (layer, (inputs, outputs)), name in pairs(shapes.items(), settings.runs):
        make = partial(torch.randn, dtype=torch.bfloat16, device=settings.device)
        x, weight = make(settings.length, inputs).requires_grad_(), nn.Parameter(make(outputs, inputs))
        grad = make(settings.length, outputs)
        config = configuration(settings, RUNS[name]).training
        fp8 = FP8Products(config, ALONE, ALONE) if config.fp8_format else None
        if fp8 is not None and fp8.is_delayed:
            fp8.history = torch.full((1, 3), 6.0, device=settings.device)
        flops = 2.0 * settings.length * inputs * outputs
        whole = 3.0 * flops / seconds(partial(linear, x, weight, grad, fp8), settings) / TERA
        with torch.no_grad():
            if fp8 is None:
                alone = partial(torch.mm, x, weight.t())
            else:
                (a,), (b,) = fp8.quantise("input", x, 1), fp8.quantise("weight", weight, 1)
                alone = partial(product, a, b.t(), torch.bfloat16, fast_accumulation=True)
            single = flops / seconds(alone, settings) / TERA
        before = 2 * settings.runs.index(name)  # rows for this layer
        first = rows[-before].value if before else whole
        print(f"{layer + ', ' + name:28} {whole:9.1f} {whole / first:8.2f} {single:12.1f}", flush=True)
        rows.append(Row(f"{name}, {layer}", whole, "TFLOP/s", ratio=whole / first))
        rows.append(Row(f"{name}, {layer}, one product", single, "TFLOP/s"))
    return rows


def main(settings: Settings) -> int:
    """Measure every run and print the tables."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        print("bench_fp8_gpu needs a GPU, and torch sees none; --device cpu with small sizes shows that it runs")
        return 1
    device = torch.cuda.get_device_name() if settings.device == "cuda" else None
    rows = steps(settings) + products(settings)
    if settings.keep:
        append("fp8_gpu", rows, device=device)
    return 0


if __name__ == "__main__":
    sys.exit(main(tyro.cli(Settings, description=__doc__)))
