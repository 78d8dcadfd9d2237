"""Metrics and times of an engine's steps, in the files of training runs, for ``megatron-diagnose``."""

import atexit
import platform
import time
from dataclasses import dataclass
from pathlib import Path

from megatron_core.config import RunConfig
from megatron_core.feature import used_features
from megatron_core.monitor.device import current_memory_bytes, peak_memory_bytes, total_memory_bytes
from megatron_core.monitor.events import Sink, StepEvent
from megatron_core.monitor.sinks import LenientSink, SinkContext, build_sinks, metrics_path
from megatron_core.parallel import ParallelGroups, World
from megatron_core.parallel.meter import PROCESS_BEGAN, unix_time
from megatron_core.reports.goodput import Goodput
from megatron_core.reports.measurements import TransferSampling
from megatron_core.reports.meter import METER, StepTimes
from megatron_core.reports.metrics import RankWriter
from megatron_core.training.state import TrainState


@dataclass(frozen=True)
class StepReport:
    """The result of an optimizer step; equal on all ranks."""

    iteration: int
    loss: float
    """Mean of the losses of all micro-batches, or (sum of losses) / (number of terms)."""
    grad_norm: float
    """Global gradient norm before clipping, without the loss scale."""
    learning_rate: float
    """Learning rate of the first parameter group."""
    skipped: bool
    """Whether the update was skipped because a gradient was not finite (fp16)."""


class StepMonitor:
    """Sends an event of each step to the sinks of rank 0, and writes the times of each rank next to ``metrics_file``.

    It does nothing unless a destination is set. There is no console line, because its fields are those of a GPT.
    ``tokens_per_second`` and ``model_flops_per_second`` are 0: tokens and FLOPs of any model are unknown; the event's
    ``breakdown`` has ``samples per second``.
    """

    def __init__(self, config: RunConfig, groups: ParallelGroups, world: World, layout: str) -> None:
        self._config = config
        self._groups = groups
        self._world = world
        self._layout = layout
        has_sink = any(feature.sink is not None for feature in used_features(config))
        self.is_on = has_sink or config.monitor.metrics_file is not None
        self._sinks: list[Sink] = []
        self._writer: RankWriter | None = None
        self._goodput = Goodput()
        self._is_open = False
        self._began = 0.0
        self.totals: StepTimes | None = None
        """Times of all steps, if ``keep_totals`` was called."""

    def keep_totals(self) -> StepTimes:
        """Measure from the next step on; return the times of all steps, which later steps add to."""
        self.is_on = True
        self.totals = StepTimes()
        return self.totals

    def begin(self, iteration: int) -> None:
        """Open the files before the first step; ``iteration``: number of steps so far."""
        if not self.is_on or self._is_open:
            return
        settings = self._config.monitor
        rank = self._world.rank
        self._is_open = True
        if rank == 0:
            context = SinkContext(self._config, start_iteration=iteration, logged=self._config.flat())
            self._sinks = [LenientSink(sink) for sink in build_sinks(context)]
        about = {
            "world_size": self._world.size,
            "coordinates": dict(self._groups.coordinates),
            "host": platform.node(),
            "device": self._world.device.type,
            "began": PROCESS_BEGAN,
            "iteration": iteration,
            "layout": self._layout,
            "memory_total": total_memory_bytes(),
            **({"config": self._config.flat()} if rank == 0 else {}),
        }
        path = metrics_path(settings, None)
        if path is not None and self._config.value("record_times"):
            self._writer = RankWriter(Path(path), rank, about)
        self._goodput.add({"kind": "start", **about})
        METER.start(self._groups, self._world.device, TransferSampling() if self._world.device.type == "cuda" else None)
        self._began = time.perf_counter()
        atexit.register(self.close)

    def after_step(
        self,
        state: TrainState,
        loss: float,
        grad_norm: float,
        rate: float,
        scale: float,
        samples: int,
        *,
        skipped: bool,
    ) -> None:
        """Write the times of a step of ``samples`` samples, and send its event; ``state``: counters after the step."""
        if not self._is_open or not self.is_on:
            return
        now = time.perf_counter()
        seconds = now - self._began
        self._began = now
        times = METER.take()
        if self.totals is not None:
            self.totals.add(times)
        in_use = current_memory_bytes()
        peak = peak_memory_bytes()
        memory = {"current": in_use, "peak": peak, "activations and buffers": max(peak - in_use, 0)}
        if self._writer is not None:
            position = (state.iteration, state.iteration, unix_time())
            self._goodput.add(self._writer.write(*position, times, memory, int(skipped)))
        event = StepEvent(
            iteration=state.iteration,
            total_iterations=self._config.training.train_iters or state.iteration,
            consumed_samples=state.consumed_samples,
            consumed_tokens=state.consumed_tokens,
            loss=loss,
            learning_rate=rate,
            global_batch_size=samples,
            loss_scale=scale,
            grad_norm=grad_norm,
            elapsed_ms=1000.0 * seconds,
            memory_bytes=peak,
            breakdown={"samples per second": samples / seconds},
            skipped=skipped,
            phases=times.phases | {name: traffic.exposed for name, traffic in times.traffic.items() if traffic.exposed},
            memory=memory,
            goodput=self._goodput.share if self._writer is not None else None,
            layout=self._layout,
        )
        for sink in self._sinks:
            sink.on_step(event)

    def close(self) -> None:
        """Close the files."""
        METER.stop()
        for sink in self._sinks:
            sink.close()
        if self._writer is not None:
            self._writer.close()
        self._sinks = []
        self._writer = None
        self.is_on = False
