"""Measure this machine's performance for the planner: products, memory, collectives, disk."""

import os
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import functional

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.monitor.device import total_memory_bytes
from megatron_core.parallel import World
from megatron_core.parallel.collectives import all_gather_flat_, all_reduce_
from megatron_core.planner.cost import step_cost
from megatron_core.planner.explain import readable_bytes, readable_seconds
from megatron_core.planner.hardware import Hardware, Link
from megatron_core.reports.reference_rate import wait_for_device
from megatron_core.training.setup import set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
MESSAGES = tuple(2**power for power in (10, 14, 18, 20, 22, 24))
"""Bytes per rank of the measured collectives."""
SMALL_STEP: dict[str, object] = {
    "num_layers": 8,
    "hidden_size": 64,
    "num_attention_heads": 2,
    "seq_length": 16,
    "vocab_size": 128,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "mock_data": True,
    "global_batch_size": 4,
    "train_iters": 1000,
}
"""A step with negligible arithmetic, whose time is the fixed cost of its operations."""
LARGE_STEP = SMALL_STEP | {"hidden_size": 256, "num_attention_heads": 8, "seq_length": 128, "vocab_size": 2048}
"""A step dominated by arithmetic, for the rates in a real step: with shared caches and clocks and new pages."""


@dataclass(frozen=True)
class RankMeasurements:
    """Measurements of one rank."""

    products: dict[str, float]
    edge: float
    attention: float
    bandwidth: float
    host_link: float
    collectives: dict[int, dict[int, tuple[float, float]]]
    """Seconds of an all-gather and of an all-reduce, by size of the group and bytes per rank."""


def best_time(call: Callable[[], object], device: torch.device, rounds: int) -> float:
    """Minimal seconds of a call over ``rounds`` rounds, including the device's work."""
    call()
    times = []
    for _ in range(rounds):
        wait_for_device(device)
        began = time.perf_counter()
        call()
        wait_for_device(device)
        times.append(time.perf_counter() - began)
    return min(times)


def measure_rank(quick: bool) -> RankMeasurements:
    """Measure all rates of this rank, while all other ranks run the same measurement."""
    gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", dist.get_rank()) if gpu else torch.device("cpu")
    rounds = 3 if quick else 8
    large, small = (512, 64) if quick else (1024, 64)
    large, small = (8192, 1024) if gpu else (large, small)
    products = {name: product_rate(large, dtype, device, rounds) for name, dtype in DTYPES.items()}
    # A product of n x n x n runs at 1 / (1 + e / n)^3 of the rate of large ones.
    ratio = (products["float32"] / product_rate(small, torch.float32, device, 20 * rounds)) ** (1 / 3)
    edge = min(max((ratio - 1) * small * large / max(large - ratio * small, 1.0), 0.0), 4.0 * small)
    dist.barrier()
    return RankMeasurements(
        products,
        edge,
        attention_share(products["float32" if not gpu else "bfloat16"], device, rounds, gpu),
        elements_rate(device, rounds, 2**28 if gpu else 2**22),
        link_rate(device, rounds) if gpu else copy_rate(rounds),
        collective_times(device, rounds),
    )


def product_rate(size: int, dtype: torch.dtype, device: torch.device, rounds: int) -> float:
    """FLOPs per second of a square matrix product."""
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    return 2 * size**3 / best_time(lambda: left @ right, device, rounds)


def attention_share(rate: float, device: torch.device, rounds: int, gpu: bool) -> float:
    """Rate of causal attention divided by ``rate``, the rate of products; counts only visible pairs, in forward and
    backward (3.5 times the forward's arithmetic)."""
    length, heads, dtype = (4096, 16, torch.bfloat16) if gpu else (512, 4, torch.float32)
    shape = (1, heads, length, 64)
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))

    def both() -> None:
        functional.scaled_dot_product_attention(query, key, value, is_causal=True).sum().backward()

    flops = 3.5 * 4 * 64 * heads * length * (length + 1) / 2
    return flops / best_time(both, device, rounds) / rate


def elements_rate(device: torch.device, rounds: int, numel: int) -> float:
    """Bytes per second of elementwise operations: the mean over a copy, a sum, an activation and a norm."""
    x, y = (torch.randn(numel // 1024, 1024, device=device) for _ in range(2))
    operations: list[tuple[Callable[[], Tensor], int]] = [
        (lambda: y.copy_(x), 2),
        (lambda: torch.add(x, y), 3),
        (lambda: functional.gelu(x), 2),
        (lambda: functional.layer_norm(x, (1024,)), 2),
    ]
    seconds = sum(best_time(call, device, rounds) for call, _ in operations)
    return 4 * numel * sum(tensors for _, tensors in operations) / seconds


def copy_rate(rounds: int) -> float:
    """Bytes per second of a copy in host memory."""
    x = torch.zeros(2**22)
    return 4 * x.numel() / best_time(x.clone, torch.device("cpu"), rounds)


def link_rate(device: torch.device, rounds: int) -> float:
    """Bytes per second from pinned host memory to the device."""
    host = torch.zeros(2**26, pin_memory=True)
    on_device = torch.zeros(2**26, device=device)
    return 4 * host.numel() / best_time(lambda: on_device.copy_(host, non_blocking=True), device, rounds)


def collective_times(device: torch.device, rounds: int) -> dict[int, dict[int, tuple[float, float]]]:
    """Seconds of collectives among 2, 4, ... and all ranks, on the slowest rank."""
    world = dist.get_world_size()
    rank = dist.get_rank()
    sizes = sorted({n for n in (2, 4, 8, 16, world) if 1 < n <= world})
    times: dict[int, dict[int, tuple[float, float]]] = {}
    for size in sizes:
        group = dist.new_group(list(range(size)))
        if rank < size:
            times[size] = {bytes_: _both(bytes_ // 4, group, device, rounds) for bytes_ in MESSAGES}
        dist.barrier()
    return times


def _both(numel: int, group: dist.ProcessGroup, device: torch.device, rounds: int) -> tuple[float, float]:
    shard = torch.zeros(numel, device=device)
    full = torch.zeros(numel * group.size(), device=device)
    gather = best_time(lambda: all_gather_flat_(full, shard, group), device, 2 * rounds)
    return gather, best_time(lambda: all_reduce_(shard, group), device, 2 * rounds)


def link_of(rates: RankMeasurements) -> Link:
    """Fit latency and bandwidth of the largest group: t = latency x steps + bytes sent / bandwidth."""
    if not rates.collectives:
        return Link(bandwidth=rates.bandwidth, latency=1e-6)
    size, times = max(rates.collectives.items())
    return fitted_link(size, {size: gather for size, (gather, _) in times.items()})


def fitted_link(size: int, times: dict[int, float]) -> Link:
    """Fit a link to the seconds of all-gathers among ``size`` ranks, by bytes of a rank: the smallest and largest."""
    small = min(times)
    large = max(times)
    sent = (size - 1) * (large - small)
    steps = max((size - 1).bit_length(), 1)
    return Link(bandwidth=sent / max(times[large] - times[small], 1e-9), latency=times[small] / steps)


def disk_rates(folder: str | None, size: int) -> tuple[float, float]:
    """Bytes per second written to disk, including a sync, and bytes per second read back."""
    block = os.urandom(2**20)
    try:
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            began = time.perf_counter()
            for _ in range(size // len(block)):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
            written = time.perf_counter() - began
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            began = time.perf_counter()
            file.seek(0)
            while file.read(2**24):
                pass
            return size / written, size / (time.perf_counter() - began)
    except OSError as error:
        raise ConfigError(f"disk={folder!r} cannot be measured: {error}; give another folder") from None


def own_step(settings: dict[str, object]) -> float:
    """Minimal seconds of a training step in a world of one rank; all ranks run it independently at the same time."""
    gpu = dist.get_backend() == "nccl"
    device = torch.device("cuda", dist.get_rank()) if gpu else torch.device("cpu")
    run = set_up(RunConfig.from_flat(settings), World(0, 1, local_rank=0, device=device))
    times = []
    for _ in range(10):
        began = time.perf_counter()
        train_step(run)
        wait_for_device(device)
        times.append(time.perf_counter() - began)
    return min(times[2:])


def measured_machine(
    ranks: int | None, folder: str | None, *, quick: bool
) -> tuple[Hardware, RankMeasurements, tuple[float, float]]:
    """Run all measurements on ``ranks`` ranks at once (default: one per GPU, or per core), and on the disk of
    ``folder``; ``quick`` uses smaller tensors and fewer repetitions. ``ConfigError`` for too many ranks."""
    gpus = torch.cuda.device_count()
    ranks = ranks if ranks is not None else gpus or len(os.sched_getaffinity(0))
    if ranks < 1 or (gpus and ranks > gpus):
        raise ConfigError(f"ranks={ranks} is out of range; legal: 1 to {gpus or os.cpu_count()}")
    device = "cuda" if gpus else "cpu"
    every: list[RankMeasurements] = run_ranks(ranks, measure_rank, quick, timeout=300.0, device=device)
    mean = every[0]
    products = {name: statistics.mean(rates.products[name] for rates in every) for name in DTYPES}
    memory = torch.cuda.get_device_properties(0).total_memory if gpus else total_memory_bytes() / ranks
    link = link_of(mean)
    disk = disk_rates(folder, 2**24 if quick else 2**27)
    hardware = Hardware(
        name="machine",
        source="megatron-diagnose --machine",
        memory_bytes=memory,
        reserved_bytes=2e9 if gpus else min(5e8, memory / 4),
        devices_per_node=ranks,
        product_flops=products | {"float64": products["float32"] / 2},
        product_edge=mean.edge,
        attention_efficiency=min(mean.attention, 1.0),
        memory_bandwidth=statistics.mean(rates.bandwidth for rates in every),
        launch_seconds=1e-6,
        intra=link,
        inter=link,
        overlap=0.8 if gpus else 0.0,  # ranks on a CPU compute and communicate with the same core
        has_host=gpus > 0,
        host_link=mean.host_link,
        host_memory_bandwidth=mean.bandwidth if not gpus else 2e10,
        disk_bandwidth=min(disk),
    )
    steps = [
        statistics.mean(run_ranks(ranks, own_step, config, timeout=300.0, device=device))
        for config in ((SMALL_STEP,) if gpus else (SMALL_STEP, LARGE_STEP))
    ]
    return calibrated(hardware, *steps), mean, disk


def calibrated(hardware: Hardware, small: float, large: float | None = None) -> Hardware:
    """Fit ``launch_seconds`` so that the predicted time of ``SMALL_STEP`` is ``small``; scale the rates of products and
    of memory so that the predicted time of ``LARGE_STEP`` is ``large``."""

    def predicted(settings: dict[str, object], machine: Hardware) -> float:
        return step_cost(RunConfig.from_flat(settings), 1, machine, int(str(settings["vocab_size"]))).seconds

    none, many = (predicted(SMALL_STEP, replace(hardware, launch_seconds=seconds)) for seconds in (0.0, 1e-3))
    launch = max((small - none) / (many - none) * 1e-3, 1e-7)
    hardware = replace(hardware, launch_seconds=launch)
    if large is None:
        return hardware
    launches = predicted(LARGE_STEP, hardware) - predicted(LARGE_STEP, replace(hardware, launch_seconds=0.0))
    factor = (predicted(LARGE_STEP, hardware) - launches) / max(large - launches, 1e-9)
    products = {name: rate * factor for name, rate in hardware.product_flops.items()}
    return replace(hardware, product_flops=products, memory_bandwidth=hardware.memory_bandwidth * factor)


def describe_machine(hardware: Hardware, rates: RankMeasurements, disk: tuple[float, float]) -> str:
    """Describe the measurements as text."""
    lines = [f"{hardware.devices_per_node} ranks, each with {readable_bytes(hardware.memory_bytes)} of memory"]
    for name, rate in rates.products.items():
        lines.append(f"products in {name}: {rate / 1e9:.3g} GFLOP/s; at 1/2 of that with sides of ")
        lines[-1] += f"{hardware.product_edge / (2 ** (1 / 3) - 1):.3g}"
    lines.append(f"attention: {rates.attention:.3g} of the rate of products")
    lines.append(f"elementwise operations: {readable_bytes(hardware.memory_bandwidth)}/s")
    lines.append(f"fixed cost of an operation: {readable_seconds(hardware.launch_seconds)}")
    for size, times in rates.collectives.items():
        for bytes_, (gather, reduce) in times.items():
            lines.append(
                f"{size} ranks, {readable_bytes(bytes_)} each: all-gather {readable_seconds(gather)}, "
                f"{readable_bytes((size - 1) * bytes_ / gather)}/s sent; all-reduce {readable_seconds(reduce)}"
            )
    lines.append(f"disk: writes {readable_bytes(disk[0])}/s, reads {readable_bytes(disk[1])}/s")
    return "\n".join(lines)
