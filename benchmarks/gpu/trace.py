"""Figures from the profiler's trace: launches of a layer, waits of the host in a step, and what overlaps.

    python -m benchmarks.gpu.trace "launches"
    python -m benchmarks.gpu.trace "gradient reduction"     # an overlap switch, off and on

A kernel or copy that moves data for a switch is hidden while a kernel that computes runs at the same time on the same
device. ``hidden`` is the hidden share of the time of these transfers.
"""

from __future__ import annotations

import json
import re
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.gpu.figures import arguments, skip, write_figures
from benchmarks.gpu.layouts import LIMIT, number_of_gpus
from benchmarks.gpu.speed import settings_of
from benchmarks.gpu.stages import TRACES
from benchmarks.gpu.training import world_on
from megatron_core.config import RunConfig
from megatron_core.parallel import World
from megatron_core.training.setup import Run, set_up
from megatron_core.training.step import train_step
from megatron_core.verify.ranks import run_ranks

WARM_UPS, STEPS = 3, 2
DEPTHS = (2, 4)
LAUNCHES = re.compile(r"^(cuda|cu)(LaunchKernel|LaunchCooperativeKernel|GraphLaunch|Memcpy.*Async|Memset.*Async)")
"""Calls that start work on the device."""
WAITS = re.compile(r"^cuda(StreamSynchronize|DeviceSynchronize|EventSynchronize|Memcpy|Malloc|Free)$")
"""Calls in which the host waits for the device."""
OPERATOR = "cpu_op"
"""Category of what counts as a launch on a CPU."""
Span = tuple[float, float]
SWITCHES: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    # ranks, settings of both, settings that turn it on, pattern of the transfers' names
    "gradient reduction": (2, {}, {"overlap_grad_reduce": True}, "nccl"),
    "zero3 gathers": (2, {"zero_stage": 3}, {"overlap_param_gather": True, "overlap_grad_reduce": True}, "nccl"),
    "tensor parallel": (
        2,
        {"tensor_model_parallel_size": 2, "sequence_parallel": True},
        {"tp_comm_overlap": True},
        "nccl",
    ),
    "expert all-to-all": (
        2,
        {
            "num_experts": 8,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 1024,
            "expert_model_parallel_size": 2,
            "micro_batches": 4,
        },
        {"overlap_moe_expert_parallel_comm": True},
        "nccl",
    ),
    "activation offload": (1, {}, {"cpu_offloading": True, "cpu_offloading_num_layers": 2}, "Memcpy (HtoD|DtoH)"),
    "optimizer offload": (1, {}, {"optimizer_cpu_offload": True}, "Memcpy (HtoD|DtoH)"),
}


def shape(device: str, layers: int) -> dict[str, Any]:
    """The model that is profiled: the one of ``speed gpt 1b`` with fewer layers."""
    settings = settings_of("gpt 1b", device)
    return settings | {"num_layers": layers, "micro_batch_size": min(settings["micro_batch_size"], 4)}


def traced(run: Run, device: str) -> tuple[list[dict[str, Any]], float]:
    """The events of ``STEPS`` steps, and the seconds of a step without the profiler."""
    activities = [torch.profiler.ProfilerActivity.CPU]
    if device == "cuda":
        activities.append(torch.profiler.ProfilerActivity.CUDA)
    seconds = []
    for _ in range(WARM_UPS):
        began = time.perf_counter()
        train_step(run)
        if device == "cuda":
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(STEPS):
            train_step(run)
        if device == "cuda":
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [event for event in events if event.get("ph") == "X"], statistics.median(seconds[1:])


def launches(events: Sequence[dict[str, Any]], device: str) -> int:
    """Calls that start work on the device; on a CPU operators."""
    if device == "cpu":
        return sum(event.get("cat") == OPERATOR for event in events)
    return sum(bool(LAUNCHES.match(event["name"])) for event in events)


def waits(events: Sequence[dict[str, Any]]) -> Counter[str]:
    """Calls in which the host waits, by name."""
    return Counter(event["name"] for event in events if WAITS.match(event["name"]))


def united(spans: Iterable[Span]) -> list[Span]:
    """The same moments as disjoint spans, in order."""
    union: list[Span] = []
    for began, ended in sorted(spans):
        if union and began <= union[-1][1]:
            union[-1] = (union[-1][0], max(union[-1][1], ended))
        else:
            union.append((began, ended))
    return union


def common(a: Sequence[Span], b: Sequence[Span]) -> float:
    """The length of the intersection of two unions."""
    total, i, j = 0.0, 0, 0
    while i < len(a) and j < len(b):
        total += max(min(a[i][1], b[j][1]) - max(a[i][0], b[j][0]), 0.0)
        if a[i][1] <= b[j][1]:
            i += 1
        else:
            j += 1
    return total


def overlap(events: Sequence[dict[str, Any]], transfers: str) -> dict[str, float]:
    """Milliseconds of transfers in a step, and the share of them that computation hides."""
    of_device = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy")]
    is_transfer = [re.search(transfers, event["name"]) is not None for event in of_device]
    spans = [(event["ts"], event["ts"] + event["dur"]) for event in of_device]
    moving = united(span for span, moves in zip(spans, is_transfer, strict=True) if moves)
    computing = united(
        span
        for span, moves, event in zip(spans, is_transfer, of_device, strict=True)
        if not moves and event["cat"] == "kernel"
    )
    time_moving = sum(ended - began for began, ended in moving)
    hidden = common(moving, computing) / time_moving if time_moving else 0.0
    return {"transfers_ms": time_moving / STEPS / 1e3, "hidden": hidden}


def count_launches(device: str) -> dict[str, Any]:
    """Launches of a layer, from two depths, and waits of a step."""
    counts: dict[int, int] = {}
    figures: dict[str, Any] = {}
    for layers in DEPTHS:
        run = set_up(RunConfig.from_flat(shape(device, layers)), world_on(device))
        events, _ = traced(run, device)
        counts[layers] = launches(events, device)
        stalls = waits(events)
        figures = {
            "host_waits_per_step": sum(stalls.values()) / STEPS,
            "host_waits": {name: count / STEPS for name, count in stalls.items()},
        }
    shallow, deep = DEPTHS
    per_layer = (counts[deep] - counts[shallow]) / (deep - shallow) / STEPS
    step = counts[shallow] / STEPS - shallow * per_layer
    counted = "operators" if device == "cpu" else "launches"
    return {"counted": counted, "launches_per_layer": per_layer, "launches_besides_layers": step} | figures


def of_rank(device: str, settings: dict[str, Any], transfers: str) -> dict[str, float]:
    """The overlap of one rank."""
    world = world_on(device)
    if dist.is_initialized():
        world = World(dist.get_rank(), dist.get_world_size(), 0, torch.device("cuda", torch.cuda.current_device()))
    run = set_up(RunConfig.from_flat(settings), world)
    events, seconds = traced(run, device)
    return overlap(events, transfers) | {"step_seconds": seconds}


def compare_switch(name: str, device: str) -> dict[str, Any]:
    """The overlap with a switch off and on."""
    ranks, base, on, transfers = SWITCHES[name]
    settings = shape(device, DEPTHS[1]) | base
    copies = ranks // settings.get("tensor_model_parallel_size", 1)
    settings["global_batch_size"] = settings["micro_batch_size"] * copies * settings.pop("micro_batches", 2)
    figures: dict[str, Any] = {}
    for state, extra in (("off", {}), ("on", on)):
        arguments_of_rank = (device, settings | extra, transfers)
        if ranks == 1:
            figures[state] = of_rank(*arguments_of_rank)
        else:
            figures[state] = run_ranks(ranks, of_rank, *arguments_of_rank, timeout=LIMIT, device=device)[0]
        write_figures(None, figures)
    return figures | {"hidden": figures["on"]["hidden"]}


def main() -> int:
    """Measure one of ``TRACES``."""
    given = arguments("trace")
    if given.trace not in TRACES:
        print(f"trace {given.trace!r} is not known; legal: {', '.join(TRACES)}")
        return 1
    if given.trace == "launches":
        write_figures(given.out, count_launches(given.device))
        return 0
    ranks = SWITCHES[given.trace][0]
    if given.device == "cpu":
        skip(given.out, "transfers overlap on a GPU")
    if ranks > 1 and number_of_gpus() < ranks:
        skip(given.out, f"this overlap is between {ranks} GPUs")
    write_figures(given.out, compare_switch(given.trace, given.device))
    return 0


if __name__ == "__main__":
    sys.exit(main())
