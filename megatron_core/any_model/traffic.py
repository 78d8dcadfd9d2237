"""A table of the collectives of engines: calls, bytes, latency and bandwidth by group and kind."""

from collections.abc import Iterable
from typing import Any

import torch.distributed as dist

from megatron_core.parallel.meter import StepTimes, Traffic

COLUMNS = ("Comm. Op", "Sent Per Call", "Count", "Total Latency(ms)", "Avg Latency(ms)", "busbw_avg (Gbps)")
STRAGGLER = "Straggler(ms)"


def summarize_traffic(totals: Iterable[StepTimes], *, stragglers: bool) -> dict[str, dict[str, float]]:
    """Return a row for each kind, such as ``dp all_reduce``, from the times of engines.

    Bytes are those that this rank sends in a ring algorithm, so the bandwidth is that of a link. With ``stragglers``,
    which all ranks need to set together, a row has the time of this rank beyond that of the fastest rank.
    """
    total = StepTimes()
    for times in totals:
        total.add(times)
    fastest = _fastest(total) if stragglers else {}
    rows = {}
    for name, traffic in sorted(total.traffic.items()):
        row = {
            "count": traffic.calls,
            "msg_size_bytes": traffic.bytes / traffic.calls,
            "total_latency_ms": 1e3 * traffic.in_flight,
            "avg_latency_ms": 1e3 * traffic.in_flight / traffic.calls,
            "busbw_avg_gbps": 8e-9 * traffic.bytes / traffic.in_flight if traffic.in_flight else 0.0,
        }
        if stragglers:
            row["total_straggler_ms"] = 1e3 * (traffic.in_flight - fastest[name])
        rows[name] = row
    return rows


def _fastest(total: StepTimes) -> dict[str, float]:
    by_rank: list[Any] = [{name: traffic.in_flight for name, traffic in total.traffic.items()}]
    if dist.is_initialized():
        mine = by_rank[0]
        by_rank = [None] * dist.get_world_size()
        dist.all_gather_object(by_rank, mine)
    absent = Traffic().in_flight
    return {name: min(times.get(name, absent) for times in by_rank) for name in total.traffic}


def table_of(rows: dict[str, dict[str, float]]) -> str:
    """Return ``rows`` of ``summarize_traffic`` as lines of text."""
    names = (*COLUMNS, STRAGGLER) if any("total_straggler_ms" in row for row in rows.values()) else COLUMNS
    lines = ["".join(f"{name:<20}" for name in names)]
    for name, row in rows.items():
        numbers = [f"{row['msg_size_bytes']:.0f} B", f"{row['count']:.0f}"]
        others = [value for key, value in row.items() if key not in ("msg_size_bytes", "count")]
        lines.append("".join(f"{text:<20}" for text in (name, *numbers, *(f"{value:.2f}" for value in others))))
    return "\n".join(lines)
