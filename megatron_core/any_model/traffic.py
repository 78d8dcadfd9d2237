"""A table of the collectives of engines: calls, bytes, latency and bandwidth by group and kind."""

from typing import Any

import torch.distributed as dist

from megatron_core.reports.meter import StepTimes

LOGGED: list[StepTimes] = []
"""Times of the engines in the table; see ``StepMonitor.keep_totals``."""


def log_summary(show_straggler: bool = False, return_dict: bool = False) -> dict[str, Any] | None:
    """Print on rank 0 a row for each kind, such as ``dp all_reduce``, of all steps so far.

    Bytes are those that this rank sends in a ring algorithm, so the bandwidth is that of a link. With
    ``show_straggler``, which all ranks need to set together, a row has the time beyond that of the fastest rank.
    ``return_dict``: return the rows by kind and bytes of a call.
    """
    total = StepTimes()
    for times in LOGGED:
        total.add(times)
    rank, size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    by_rank: list[Any] = [{name: traffic.in_flight for name, traffic in total.traffic.items()}]
    if show_straggler and size > 1:
        seconds = by_rank[0]
        by_rank = [None] * size
        dist.all_gather_object(by_rank, seconds)
    summary: dict[str, dict[int, dict[str, float]]] = {}
    for name, traffic in sorted(total.traffic.items()):
        row = {
            "count": traffic.calls,
            "msg_size_bytes": traffic.bytes / traffic.calls,
            "total_latency_ms": 1e3 * traffic.in_flight,
            "avg_latency_ms": 1e3 * traffic.in_flight / traffic.calls,
            "busbw_avg_gbps": 8e-9 * traffic.bytes / traffic.in_flight if traffic.in_flight else 0.0,
        }
        if show_straggler:
            fastest = min(times.get(name, 0.0) for times in by_rank)
            row["total_straggler_ms"] = 1e3 * (traffic.in_flight - fastest)
        summary[name] = {int(row["msg_size_bytes"]): row}
        if rank == 0:
            print(f"{name:<24}" + "  ".join(f"{label} {value:.2f}" for label, value in row.items()))
    if rank == 0 and not summary:
        print('log_summary: set "comms_logger": {"enabled": true} in the JSON')
    return {"summary": summary, "metadata": {"world_size": size, "rank": rank}} if return_dict else None
