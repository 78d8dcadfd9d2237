"""--trace-pipeline: when the actions of this rank's steps ran."""

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
from megatron_core.pipeline_parallel.executor import Listener
from megatron_core.schedules.actions import Action
from megatron_core.schedules.trace import Recording, TraceWriter


def trace_writer(config: RunConfig, groups: ParallelGroups, stage_to_rank: tuple[int, ...]) -> TraceWriter | None:
    """This rank's trace, if one is asked for."""
    if config.monitor.trace_pipeline is None:
        return None
    own = config.parallel.pipeline_plan
    schedule = Path(own).name if own else config.parallel.schedule(config.model.num_layers)
    return TraceWriter(config.monitor.trace_pipeline, groups.rank, groups.ranks("pp"), schedule, stage_to_rank)


@contextmanager
def traced(
    trace: TraceWriter | None, step: int, listener: Listener, groups: ParallelGroups, device: torch.device
) -> Iterator[Listener]:
    """The step that runs inside is recorded by the listener that this gives, and written afterwards.

    Ranks begin a recorded step together. Without a trace, or when it is full, the listener is the given one.
    """
    if trace is None or trace.is_full:
        yield listener
        return
    all_reduce_(torch.zeros(1, device=device), groups.group(WORLD))
    recording = Recording(clock_of(device))

    def begin(action: Action) -> None:
        recording.begin(action)
        listener.on_begin(action)

    def end(action: Action) -> None:
        listener.on_end(action)
        recording.end(action)

    yield replace(listener, on_begin=begin, on_end=end)
    trace.write(step, recording)


def clock_of(device: torch.device) -> Callable[[], float]:
    """Seconds on the host's monotonic clock; on a GPU, once all work before is done.

    Only the stream that computes is waited for: messages are sent and received on others, and one that was posted
    early may need what this rank has yet to do.
    """
    if device.type != "cuda":
        return time.monotonic

    def clock() -> float:
        torch.cuda.current_stream(device).synchronize()
        return time.monotonic()

    return clock
