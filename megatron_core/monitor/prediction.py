"""The planner's prediction of how much faster a run would be in another layout."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from statistics import median
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError, LayoutError
from megatron_core.monitor.summary import Summary
from megatron_core.planner.hardware import Hardware, Link, known_hardware, read_hardware
from megatron_core.planner.search import Candidate, Search, with_settings

COMPUTED = ("products", "attention", "elements", "launches")
"""The planner's kinds of time that make up forward and backward."""


def predicted_gain(summary: Summary, settings: Mapping[str, Any], kind: str, sending: float) -> float | None:
    """The share of a step's time that ``settings`` save, per token: 1 - (tokens/s now) / (tokens/s then), both by the
    planner's cost model.

    The model's machine is scaled so that it takes as long as the run for forward and backward, and for the collectives
    of ``kind`` (the planner's name), which take the share ``sending`` of the time. None: the records lack what the
    model needs, or the layout is not legal or does not fit into memory.
    """
    found = _config(summary)
    if found is None:
        return None
    config, vocab_size = found
    devices, hardware = summary.records.header()["world_size"], summary.machine or machine_of(summary)
    try:
        seen = Search(config, devices, hardware, vocab_size).candidate(config)
        search = Search(config, devices, _calibrated(summary, hardware, seen, kind, sending), vocab_size)
        now, then = search.candidate(config), search.candidate(with_settings(config, dict(settings)))
    except (LayoutError, ConfigError, ZeroDivisionError):
        return None
    if summary.records.header().get("device") == "cuda" and not search.fits(then.memory):
        return None
    rest = max(summary.step_seconds - now.seconds, 0.0)  # what the model does not know stays as it is
    rates = [each.cost.tokens / (each.seconds + rest) for each in (now, then)]
    return 1 - rates[0] / rates[1]


def _config(summary: Summary) -> tuple[RunConfig, int] | None:
    """The settings of the run, with the batch of its last step, and the size of its vocabulary."""
    known, stored = RunConfig().flat(), summary.config
    vocab_size = summary.records.header(0).get("environment", {}).get("vocab_size") or stored.get("vocab_size")
    steps = summary.records.steps()
    if not stored or not vocab_size or not steps:
        return None
    values = known | {name: value for name, value in stored.items() if name in known}
    return RunConfig.from_flat(values | {"global_batch_size": steps[-1]["global_batch_size"]}), vocab_size


def _calibrated(summary: Summary, hardware: Hardware, seen: Candidate, kind: str, sending: float) -> Hardware:
    """``hardware`` on which the model takes as long as the run; ``ZeroDivisionError`` if one of them takes no time."""
    compute = median(times.typical_compute for times in summary.ranks.values())
    faster = sum(seen.cost.by_kind.get(each, 0.0) for each in COMPUTED) / compute
    wider = seen.cost.by_kind.get(kind, 0.0) / (sending * summary.step_seconds)

    def scaled(link: Link) -> Link:
        return Link(bandwidth=link.bandwidth * wider, latency=link.latency / wider)

    return replace(
        hardware,
        product_flops={dtype: rate * faster for dtype, rate in hardware.product_flops.items()},
        memory_bandwidth=hardware.memory_bandwidth * faster,
        launch_seconds=hardware.launch_seconds / faster,
        step_seconds=0.0,
        intra=scaled(hardware.intra),
        inter=scaled(hardware.inter),
    )


def machine_of(summary: Summary) -> Hardware:
    """The machine that a run's records name; an H100 for other GPUs, of which the run's own times set the rates."""
    header = summary.records.header(0)
    hosts = {summary.records.header(rank).get("host") for rank in summary.ranks}
    per_node = max(len(summary.ranks) // len(hosts), 1)
    if header.get("device") == "cuda":
        name = str(header.get("environment", {}).get("device", "")).lower()
        known = next((each for each in known_hardware() if each in name), "h100")
        return replace(read_hardware(known), memory_bytes=header.get("memory_total") or 80e9)
    link = Link(bandwidth=2e9, latency=2e-5)
    return Hardware(
        name="cpu", source="typical figures", memory_bytes=header.get("memory_total") or 64e9, reserved_bytes=0.0,
        devices_per_node=per_node, product_flops=dict.fromkeys(("float32", "float64", "bfloat16"), 5e10),
        product_edge=32.0, attention_efficiency=0.3, memory_bandwidth=1e10, launch_seconds=5e-6, intra=link, inter=link,
        overlap=0.25, has_host=False, host_link=1e10, host_memory_bandwidth=1e10,
    )  # fmt: skip
