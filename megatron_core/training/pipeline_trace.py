"""--trace-pipeline: start and end times of the actions in this rank's steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch

from megatron_core.config import RunConfig
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.meter import METER
from megatron_core.pipeline_parallel.executor import Listener
from megatron_core.schedules.actions import Action
from megatron_core.schedules.trace import Recording, TraceWriter


def trace_writer(config: RunConfig, groups: ParallelGroups, stage_to_rank: tuple[int, ...]) -> TraceWriter | None:
    """This rank's trace writer, or None without ``trace_pipeline``."""
    if config.monitor.trace_pipeline is None:
        return None
    own = config.parallel.pipeline_plan
    schedule = Path(own).name if own else config.parallel.schedule(config.model.num_layers)
    return TraceWriter(config.monitor.trace_pipeline, groups.rank, groups.ranks("pp"), schedule, stage_to_rank)


@contextmanager
def traced(
    trace: TraceWriter | None, step: int, listener: Listener, groups: ParallelGroups, device: torch.device
) -> Iterator[Listener]:
    """Yield a listener that records the step in this context, and write the recording afterwards.

    All ranks start a recorded step together. Without a trace, or if it is full, ``listener`` is yielded unchanged.
    """
    if trace is None or trace.is_full:
        yield listener
        return
    all_reduce_(torch.zeros(1, device=device), groups.group(WORLD))
    recording = Recording(clock_of(device), METER.waited if METER.on else lambda: 0.0)

    def begin(action: Action) -> None:
        recording.begin(action)
        listener.on_begin(action)

    def end(action: Action) -> None:
        listener.on_end(action)
        recording.end(action)

    yield replace(listener, on_begin=begin, on_end=end)
    trace.write(step, recording)


def clock_of(device: torch.device) -> Callable[[], float]:
    """Return a monotonic host clock in seconds; on a GPU it first waits for all previously queued computation.

    It synchronizes only the compute stream: messages use other streams, and a message posted early may depend on work
    that this rank has not started.
    """
    if device.type != "cuda":
        return time.monotonic

    def clock() -> float:
        torch.cuda.current_stream(device).synchronize()
        return time.monotonic()

    return clock
