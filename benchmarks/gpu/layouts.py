"""A short bfloat16 training of two ranks in one layout, compared with one rank on the same device; and its speed.

With a GPU for each rank over NCCL; on a machine with one GPU all ranks use it, over host memory (``one_gpu``). Weights
and data depend on the seed only, so that the losses differ by rounding alone.

    python -m benchmarks.gpu.layouts "tp2 sp"
    python -m benchmarks.gpu.layouts verify      # every gradient and weight in float64, as tools/verify_layout.py
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from benchmarks.gpu.figures import arguments, skip, write_figures
from benchmarks.gpu.one_gpu import on_one_gpu
from benchmarks.gpu.stages import LAYOUTS
from benchmarks.gpu.training import BF16, EXPERTS, SHAPE, TINY, TINY_BOUND, compared
from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.planner.layout import Layout
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify import GPTExperiment, parity
from megatron_core.verify.ranks import run_ranks

RANKS, STEPS, LIMIT = 2, 6, 100.0
BOUND = 1e-2
"""Of the losses' relative difference; a CPU's is 0.002."""
OVER_NCCL, OVER_HOST, ON_CPU = "NCCL", "copies in host memory, both ranks on one GPU", "shared memory of the CPU"
OVERLAPPED: dict[str, dict[str, Any]] = {
    "tp2 sp": {"tp_comm_overlap": True},
    "dp2 ep2": {"overlap_moe_expert_parallel_comm": True},
}
"""Switches of a layout besides those that its word ``overlap`` sets."""
VERIFIED = ("tp2 sp", "pp2 1f1b", "pp2 zb_h1", "dp2 zero1 overlap", "dp2 zero3 overlap", "cp2")


def settings_of(name: str, device: str) -> dict[str, Any]:
    """The settings of a layout, named as in ``LAYOUTS``."""
    words = name.removesuffix(", cuda graphs")
    layout = Layout.parse(f"{words} overlap" if words.startswith("dp2") else words)
    settings = SHAPE | (TINY if device == "cpu" else {}) | BF16 | {"train_iters": STEPS}
    if layout.ep > 1:
        settings |= EXPERTS
    if words != name:
        settings |= {"cuda_graph_impl": "local"}
    return settings | layout.settings() | OVERLAPPED.get(words, {})


def train(settings: dict[str, Any]) -> tuple[list[float], float]:
    """The loss of every step, and the median seconds of the later half of the steps."""
    device = torch.device("cuda", torch.cuda.current_device()) if dist.get_backend() == "nccl" else torch.device("cpu")
    run = set_up(RunConfig.from_flat(settings), World(dist.get_rank(), dist.get_world_size(), 0, device))
    losses, seconds = [], []
    for _ in range(STEPS):
        began = time.perf_counter()
        losses.append(float(train_step(run).loss))
        if device.type == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    return losses, statistics.median(seconds[STEPS // 2 :])


def number_of_gpus() -> int:
    """Counted in another process: ranks that are forked after a use of CUDA cannot use it."""
    count = "import torch; print(torch.cuda.device_count())"
    return int(subprocess.run([sys.executable, "-c", count], capture_output=True, text=True, check=True).stdout)


def transport_of(device: str, gpus: int) -> str:
    """How ``RANKS`` ranks exchange tensors."""
    if device == "cpu":
        return ON_CPU
    return OVER_NCCL if gpus >= RANKS else OVER_HOST


def start(transport: str, ranks: int, function: Callable[..., Any], *args: Any, **options: Any) -> list[Any]:
    """``run_ranks`` over a transport; the results by rank."""
    options = {"timeout": LIMIT} | options
    if transport == OVER_HOST:
        return run_ranks(ranks, on_one_gpu, function, *args, **options | {"device": "cpu", "backend": "auto"})
    return run_ranks(ranks, function, *args, **options | {"device": "cuda" if transport == OVER_NCCL else "cpu"})


def measure(name: str, device: str, transport: str) -> dict[str, Any]:
    """The figures of one layout."""
    settings = settings_of(name, device)
    alone = settings | Layout().settings() | dict.fromkeys(OVERLAPPED.get(name, {}), False)
    alone.pop("cuda_graph_impl", None)
    [(expected, seconds_alone)] = start(transport, 1, train, alone)
    losses, seconds = start(transport, RANKS, train, settings)[0]
    figures = compared(losses, expected, BOUND * (TINY_BOUND if device == "cpu" else 1.0))
    tokens = settings["global_batch_size"] * settings["seq_length"]
    return figures | {
        "transport": transport,
        "tokens_per_second": tokens / seconds,
        "tokens_per_second_alone": tokens / seconds_alone,
    }


def verify(device: str, transport: str) -> dict[str, Any]:
    """Every loss, gradient, norm and weight of layouts in float64 against one process."""
    config = RunConfig.from_flat(SHAPE | TINY | {"num_layers": 4 if device == "cuda" else 2})
    rows: list[str] = []

    def show(row: Any) -> None:
        worst = max((found.error for found in (row.loss, row.gradient, row.norm, row.weight) if found), default=0.0)
        rows.append(f"{row.layout}: {'; '.join(row.faults) or f'largest error {worst:.1e}'}")
        print(rows[-1], flush=True)

    layouts = VERIFIED if device == "cuda" else VERIFIED[:1]
    with mock.patch.object(parity, "run_ranks", partial(start, transport)):
        experiment = GPTExperiment(config, 2)
        report = parity.check_parity(
            experiment, layouts, device="cuda" if device == "cuda" else "cpu", on_row=show, timeout=LIMIT
        )
    return {"within": report.holds, "layouts": rows, "transport": transport}


def main() -> int:
    """Run one layout; exit with 1 if it differs by more than its bound."""
    given = arguments("layout")
    if given.layout not in (*LAYOUTS, "verify"):
        print(f"layout {given.layout!r} is not known; legal: {', '.join(LAYOUTS)}, verify")
        return 1
    transport = transport_of(given.device, number_of_gpus() if given.device == "cuda" else 0)
    if given.layout.endswith("cuda graphs") and transport != OVER_NCCL:
        skip(given.out, f"a CUDA graph can record only NCCL's collectives, and this uses {transport}")
    if given.layout == "verify":
        figures = verify(given.device, transport)
    else:
        figures = measure(given.layout, given.device, transport)
    write_figures(given.out, figures)
    return 0 if figures["within"] else 1


if __name__ == "__main__":
    sys.exit(main())
