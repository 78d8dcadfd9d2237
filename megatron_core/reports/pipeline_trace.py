"""--trace-pipeline: start and end times of the actions and transfers in this rank's steps."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

import torch

from megatron_core.parallel.collectives import all_reduce_
from megatron_core.parallel.grid import WORLD
from megatron_core.pipeline_parallel.executor import Listener
from megatron_core.planner.simulate import TransferSpan
from megatron_core.reports.meter import METER
from megatron_core.reports.settings import PipelineTraceConfig
from megatron_core.reports.trace_files import Recording, TraceWriter
from megatron_core.schedules.actions import Action
from megatron_core.training.callbacks import Callback
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult


class PipelineTrace(Callback):
    """Writes the times of this rank's first steps to its file in ``trace_pipeline``."""

    priority = 650  # before Reports, which end the measured step

    def __init__(self, run: Run) -> None:
        config, groups = run.config, run.groups
        folder = config.monitor.section(PipelineTraceConfig).trace_pipeline
        assert folder is not None, "the feature is used"
        self.run = run
        schedule = config.parallel.plan_name or config.parallel.schedule(config.model.num_layers)
        ranks, places = groups.ranks("pp"), run.plans.stage_to_rank
        self._writer = TraceWriter(folder, groups.rank, ranks, schedule, places)
        self._recorded: tuple[Recording, int] | None = None
        """The recording of the current step, and the mark of its start in ``METER``."""

    @contextmanager
    def around_plan(self, listener: Listener) -> Iterator[Listener]:
        """Record the actions of a plan; all ranks start a recorded plan together."""
        self._write()  # a step that is computed again has several plans
        if self._writer.is_full:
            yield listener
            return
        device = self.run.world.device
        all_reduce_(torch.zeros(1, device=device), self.run.groups.group(WORLD))
        recording = Recording(clock_of(device), METER.waited if METER.on else lambda: 0.0)
        self._recorded = recording, METER.mark()

        def begin(action: Action) -> None:
            recording.begin(action)
            listener.on_begin(action)

        def end(action: Action) -> None:
            listener.on_end(action)
            recording.end(action)

        with METER.times_all():
            yield replace(listener, on_begin=begin, on_end=end)

    def after_step(self, result: StepResult) -> None:
        """Write the recording of the step."""
        self._write(self.run.state.iteration)

    def _write(self, step: int | None = None) -> None:
        """Write the recording, by default of the step that is being computed, with the transfers until now."""
        if self._recorded is None:
            return
        recording, mark = self._recorded
        self._recorded = None
        if METER.on:
            flights = METER.flights_since(mark)
            recording.transfers = [
                TransferSpan(flight.phase, flight.start, flight.end, flight.waited) for flight in flights
            ]
        self._writer.write(self.run.state.iteration + 1 if step is None else step, recording)


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
