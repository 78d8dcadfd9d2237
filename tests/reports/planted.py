"""Records of runs with a known bottleneck, in the format of a run."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_core.monitor.sinks import JsonLinesSink
from megatron_core.reports.meter import StepTimes, Traffic
from megatron_core.reports.metrics import RankWriter
from tests.monitor.examples import step

CONFIG = {
    "num_layers": 8, "seq_length": 1024, "micro_batch_size": 4, "num_workers": 2, "bf16": True, "vocab_size": 32000,
    "tensor_model_parallel_size": 1, "pipeline_model_parallel_size": 1, "context_parallel_size": 1,
}  # fmt: skip


def write_run(
    folder: Path,
    ranks: list[dict[str, float]],
    *,
    coordinates: list[dict[str, int]] | None = None,
    traffic: list[dict[str, Traffic]] | None = None,
    config: Mapping[str, Any] = {},
    about: list[dict[str, Any]] | None = None,
    memory: Mapping[str, int] = {},
    gpu: Mapping[str, float] = {},
    **event: Any,
) -> Path:
    """A run of 6 equal steps; ``ranks`` are the phases of each rank per step in seconds, ``event`` is in its
    metrics."""
    metrics, steps = folder / "metrics.jsonl", 6
    sink = JsonLinesSink(metrics)
    for rank, phases in enumerate(ranks):
        at = {axis: 0 for axis in ("tp", "cp", "dp", "pp", "etp", "ep", "edp")} | (
            coordinates[rank] if coordinates else {"dp": rank}
        )
        own = {"world_size": len(ranks), "coordinates": at, "host": f"node{rank}", "device": "cuda", "began": 0.0}
        own |= {"iteration": 0, "work": 1.0, "memory_total": 80 * 2**30} | (about[rank] if about else {})
        own |= {"config": CONFIG | dict(config)} if rank == 0 else {}
        writer = RankWriter(metrics, rank, own)
        sent = traffic[rank] if traffic else {}
        seconds = sum(phases.values()) + sum(t.exposed for t in sent.values())
        for number in range(1, steps + 1):
            writer.write(number, number, number * seconds, StepTimes(dict(phases), sent, seconds), memory, 0, gpu=gpu)
        writer.close()
    for number in range(1, steps + 1):
        sink.on_step(step(number, **({"global_batch_size": 32} | event)))
    sink.close()
    return folder
