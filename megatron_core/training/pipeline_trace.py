"""--trace-pipeline: start and end times of the actions and transfers in this rank's steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
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
from megatron_core.schedules.simulate import TransferSpan
from megatron_core.schedules.trace import Recording, TraceWriter

AroundPlan = Callable[[Listener], AbstractContextManager[Listener]]


def trace_writer(config: RunConfig, groups: ParallelGroups, stage_to_rank: tuple[int, ...]) -> TraceWriter | None:
    """This rank's trace writer, or None without ``trace_pipeline``."""
    if config.monitor.trace_pipeline is None:
        return None
    own = config.parallel.pipeline_plan
    schedule = Path(own).name if own else config.parallel.schedule(config.model.num_layers)
    return TraceWriter(config.monitor.trace_pipeline, groups.rank, groups.ranks("pp"), schedule, stage_to_rank)


@contextmanager
def traced(trace: TraceWriter | None, step: int, groups: ParallelGroups, device: torch.device) -> Iterator[AroundPlan]:
    """Yield a hook around the plan of the step in this context, and write the recording after the step.

    The hook takes the executor's listener and yields one that records. All ranks start a recorded plan together. The
    transfers of the step are recorded from there to its end. Without a trace, or if it is full, the hook yields the
    listener unchanged.
    """
    if trace is None or trace.is_full:
        yield nullcontext
        return
    recorded: list[tuple[Recording, int]] = []

    @contextmanager
    def around_plan(listener: Listener) -> Iterator[Listener]:
        all_reduce_(torch.zeros(1, device=device), groups.group(WORLD))
        recording = Recording(clock_of(device), METER.waited if METER.on else lambda: 0.0)
        recorded.append((recording, METER.mark()))

        def begin(action: Action) -> None:
            recording.begin(action)
            listener.on_begin(action)

        def end(action: Action) -> None:
            listener.on_end(action)
            recording.end(action)

        yield replace(listener, on_begin=begin, on_end=end)

    with METER.times_all():
        yield around_plan
    for recording, mark in recorded:
        if METER.on:
            flights = METER.flights_since(mark)
            recording.transfers = [TransferSpan(each.phase, each.start, each.end, each.waited) for each in flights]
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
