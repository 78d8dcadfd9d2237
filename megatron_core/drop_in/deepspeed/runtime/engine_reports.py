"""Reports of an engine: monitors, wall-clock times and the profile of FLOPs."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from deepspeed.monitor.monitor import MonitorMaster
from deepspeed.optimizers import momenta_of
from deepspeed.profiling.flops_profiler.profiler import FlopsProfiler
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.utils.timer import SynchronizedWallClockTimer
from megatron_core.any_model.monitoring import StepReport
from megatron_core.any_model.traffic import LOGGED

TIMERS = ("forward", "backward", "step")


class EngineReports:
    """The sections ``wall_clock_breakdown``, ``flops_profiler``, ``tensorboard``, ``wandb`` and ``csv_monitor``."""

    _config: DeepSpeedConfig
    core: Any
    module: Any
    optimizer: Any

    def _open_reports(self) -> None:
        self.monitor = MonitorMaster(self._config.monitor_config)
        self.timers = SynchronizedWallClockTimer()
        if (self._config._param_dict.get("comms_logger") or {}).get("enabled"):
            LOGGED.append(self.core.monitor.keep_totals())
        profiled = self._config.flops_profiler_config.enabled
        self.flops_profiler = FlopsProfiler(self.module, self) if profiled else None

    def wall_clock_breakdown(self) -> bool:
        """Whether the engine logs times of forward, backward and step."""
        return bool(self._config.wall_clock_breakdown)

    @contextmanager
    def _timed(self, name: str) -> Iterator[None]:
        """Return a context that is timed, and for a forward of the chosen step counts operations."""
        section = self._config.flops_profiler_config
        is_profiled = name == "forward" and self.core.state.iteration + 1 == section.profile_step
        profiler = self.flops_profiler if is_profiled else None
        # Without the sections no device is synchronized.
        times = self.wall_clock_breakdown()
        if profiler is not None and not profiler.flops:  # the first micro-batch of the step
            profiler.start_profile()
        if times:
            self.timers(name).start()
        try:
            yield
        finally:
            if times:
                self.timers(name).stop()
            if profiler is not None and profiler.started:
                self._print_profile(profiler)

    def _print_profile(self, profiler: FlopsProfiler) -> None:
        profiler.stop_profile()
        if self.core.world.rank == 0:
            section = self._config.flops_profiler_config
            depth, top = section.module_depth, section.top_modules
            profiler.print_model_profile(section.profile_step, depth, top, section.detailed, section.output_file)
        profiler.end_profile()

    def _report_step(self, report: StepReport, share: float = 1.0) -> None:
        """Write the events of a step, and log its times; ``share`` of the micro-batches had a ``step()``."""
        samples = self.core.state.consumed_samples
        if self.monitor.enabled:
            events = [("train_loss", share * report.loss), ("lr", report.learning_rate)]
            if self.core.config.training.fp16:
                events.append(("loss_scale", self.core.loss_scale))
            if self.wall_clock_breakdown():
                times = {name: self.timers(name).elapsed(reset=False) for name in TIMERS}
                events += [(f"elapsed_time_ms_{name}", value) for name, value in times.items()]
            self.monitor.write_events([(f"Train/Samples/{name}", value, samples) for name, value in events])
        if self.wall_clock_breakdown():
            self.timers.log(TIMERS)

    # Learning rates and norms.

    def get_lr(self) -> list[Any]:
        """Learning rate of each parameter group."""
        return self._of_groups("lr")

    def get_type(self) -> list[Any]:
        """``type`` of each parameter group, 0.0 if it has none."""
        return self._of_groups("type")

    def get_mom(self) -> list[Any]:
        """Betas of each parameter group, or momentum (SGD, RMSprop)."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        of_all = momenta_of(self._config.translation.settings)
        return [group.get("momentum", group.get("betas", of_all)) for group in groups]

    def _of_groups(self, name: str) -> list[Any]:
        return [] if self.optimizer is None else [group.get(name, 0.0) for group in self.optimizer.param_groups]

    def get_global_grad_norm(self) -> float | None:
        """Norm of the gradient of the last step before clipping; None before the first step, infinite if skipped."""
        report = self.core.last_report
        return None if report is None else math.inf if report.skipped else report.grad_norm
