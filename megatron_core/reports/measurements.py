"""Times and memory of a run's steps: records of each rank, goodput, Megatron's timers, and the straggler report."""

import json
import platform
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

import torch

from megatron_core.config.flops import forward_flops_per_token
from megatron_core.errors import wrapped
from megatron_core.launcher import read_integer
from megatron_core.monitor.device import current_memory_bytes, peak_memory_bytes, total_memory_bytes
from megatron_core.monitor.sinks import metrics_path
from megatron_core.parallel.grid import WORLD
from megatron_core.parallel.meter import PROCESS_BEGAN, unix_time
from megatron_core.parallel.texts import gather_strings
from megatron_core.reports.goodput import Goodput
from megatron_core.reports.gpu_notes import gpu_state
from megatron_core.reports.meter import METER, StepTimes
from megatron_core.reports.metrics import DETAILED, RankWriter, rank_metrics_file, read_rank_file
from megatron_core.reports.reference_rate import MEASURED, ReferenceRate, measure_product_rate, share_of_cores
from megatron_core.reports.settings import MeasurementConfig
from megatron_core.reports.timers import slowest_ranks, timer_lines
from megatron_core.training.callbacks import Callback
from megatron_core.training.setup import Run
from megatron_core.training.step import StepResult


class Measurements(Callback):
    """Measures times and memory of a run's steps on each rank, and writes them to this rank's file."""

    priority = 200

    def __init__(self, run: Run) -> None:
        self.run, self.settings = run, run.config.monitor.section(MeasurementConfig)
        self.goodput = Goodput()
        self.product_rate: float | None = None
        self._writer: RankWriter | None = None
        self._first = run.state.iteration + 1
        self._steps = self._skipped = 0
        self._stretch, self._interval = StepTimes(), StepTimes()

    def before_run(self) -> None:
        """Find the reference of utilisation, open this rank's file, and start ``METER``."""
        run = self.run
        run.event_fields.append(self.of_step)
        metrics = metrics_path(self.settings, run.config.checkpoint.run_folder)
        path = None if metrics is None else rank_metrics_file(metrics, run.world.rank)
        earlier = read_rank_file(path, []) if path is not None and path.is_file() else []
        for record in earlier:
            self.goodput.add(record)
        reference = self._reference(earlier)
        self.product_rate = reference.flops
        if run.world.rank == 0:
            print(wrapped(f"utilisation is against {reference}"), flush=True)
        about = self._about() | {"product_rate": reference.flops, "rate_of": asdict(reference)}
        if metrics is not None:
            self._writer = RankWriter(metrics, run.world.rank, about)
        self.goodput.add({"kind": "start", **about})
        # On a GPU each time of a transfer needs two events, so that transfers are timed in some steps only.
        METER.start(run.groups, run.world.device, TransferSampling() if run.world.device.type == "cuda" else None)

    def of_step(self, result: StepResult) -> dict[str, Any]:
        """Record the times of the last step; return fields of its event."""
        times, iteration = METER.take(), self.run.state.iteration
        self._steps += 1
        self._skipped += result.skipped
        self._stretch.add(times)
        self._interval.add(times)
        memory = self.memory()
        logged = iteration % self.settings.log_interval == 0
        if self._steps <= DETAILED or logged:
            self._write(iteration, memory)
        if logged:
            self._print_timers()
        exposed = {name: traffic.exposed for name, traffic in times.traffic.items() if traffic.exposed}
        return {
            "phases": {name: float(f"{s:.4g}") for name, s in (times.phases | exposed).items()},
            "memory": memory,
            "goodput": self.goodput.share,
            "product_rate": self.product_rate,
        }

    def after_run(self) -> None:
        """Write the record of the time since the last one: the last evaluation and checkpoint."""
        if METER.on:
            self._stretch.add(METER.take())
            iteration = self.run.state.iteration
            self._write(iteration, self.memory(), complete=iteration == self.run.total_iterations)
        if self._writer is not None:
            self._writer.close()

    def close(self) -> None:
        """Stop ``METER``."""
        METER.stop()

    def memory(self) -> dict[str, int]:
        """Bytes of this rank by kind.

        ``activations and buffers``: peak minus current memory. ``process``: current memory minus the training state;
        on a CPU this includes libraries and data.
        """
        state, now, peak = self.run.state_bytes(), current_memory_bytes(), peak_memory_bytes()
        known = sum(size for name, size in state.items() if name != "units whole")
        remaining = {"activations and buffers": max(peak - now, 0), "process": max(now - known, 0)}
        return {name: int(size) for name, size in state.items()} | remaining | {"current": now, "peak": peak}

    def _reference(self, earlier: Sequence[Mapping[str, Any]]) -> ReferenceRate:
        """The matrix product rate to which utilisation refers: of the run's first start on this kind of device, so that
        a restart does not change it, otherwise measured now."""
        dtype, device = self.run.config.training.compute_dtype, self.run.world.device
        threads = "" if device.type == "cuda" else f", {torch.get_num_threads()} threads"
        name = f"{_device_name(self.run)}{threads}, {self.run.world.size} ranks"
        if self.settings.peak_tflops is not None:
            return ReferenceRate(1e12 * self.settings.peak_tflops, name, dtype, "given by --peak-tflops")
        for record in earlier:
            stored = ReferenceRate.of(record.get("rate_of"))
            same = stored is not None and (stored.device, stored.dtype) == (name, dtype)
            if stored is not None and same and stored.source.startswith(MEASURED):
                return stored
        rate = measure_product_rate(device, getattr(torch, dtype))
        if device.type == "cpu":
            ranks = read_integer("LOCAL_WORLD_SIZE", self.run.world.size, least=1)
            rate *= share_of_cores(ranks, torch.get_num_threads())
        return ReferenceRate(rate, name, dtype, f"{MEASURED}{self.run.state.iteration}")

    def _about(self) -> dict[str, Any]:
        """The header of this process's records."""
        run = self.run
        about = {
            "world_size": run.world.size,
            "coordinates": dict(run.groups.coordinates),
            "host": platform.node(),
            "device": run.world.device.type,
            "began": PROCESS_BEGAN,
            "iteration": run.state.iteration,
            "layout": run.layout,
            "work": _work(run),
            "memory_total": total_memory_bytes(),
        }
        if run.world.rank == 0:
            about |= {"config": run.config.flat(), "environment": _environment(run)}
        return about

    def _write(self, iteration: int, memory: Mapping[str, int], complete: bool = False) -> None:
        stretch = (self._first, iteration, unix_time(), self._stretch, memory, self._skipped, complete)
        if self._writer is not None:
            self.goodput.add(self._writer.write(*stretch, gpu=gpu_state(self.run.world.device)))
        self._first, self._skipped, self._stretch = iteration + 1, 0, StepTimes()

    def _print_timers(self) -> None:
        """Print Megatron's timers and the straggler report, if requested; all ranks call it together."""
        settings, interval = self.settings, self._interval
        self._interval = StepTimes()
        if not settings.timing_log_level and not settings.log_straggler:
            return
        exposed = {name: traffic.exposed for name, traffic in interval.traffic.items() if traffic.exposed}
        record = {
            "prefix": self.run.groups.prefix,
            "host": platform.node(),
            "phases": interval.phases,
            "exposed": exposed,
        }
        texts = gather_strings(json.dumps(record), self.run.groups.group(WORLD), self.run.world.device)
        if self.run.world.rank == 0:
            ranks = [json.loads(text) for text in texts]
            lines = timer_lines(ranks, settings.timing_log_level, settings.timing_log_option)
            if settings.log_straggler:
                lines += slowest_ranks(ranks, settings.straggler_minmax_count)
            print("\n".join(lines), flush=True)


def _work(run: Run) -> float:
    """Forward FLOPs of a token in this rank's stages, before they are split over other axes: equal layers, and the
    output layer."""
    terms = forward_flops_per_token(run.config.model, run.config.data.seq_length, run.vocab_size)
    layers = sum(len(run.layers[stage]) for stage in run.stages)
    logits = terms.pop("logits")
    has_output_layer = len(run.layers) - 1 in run.stages
    return sum(terms.values()) * layers / run.config.model.num_layers + logits * has_output_layer


def _environment(run: Run) -> dict[str, Any]:
    """Versions of Python, torch and system, device, threads, size of the vocabulary, descriptions by features."""
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "system": platform.platform(),
        "device": _device_name(run),
        "threads": torch.get_num_threads(),
        "vocab_size": run.vocab_size,
        "descriptions": [line for run_part in run.parts for line in run_part.descriptions()],
    }


def _device_name(run: Run) -> str:
    """The model of this rank's device."""
    if run.world.device.type == "cuda":
        return torch.cuda.get_device_name(run.world.device)
    return platform.processor() or platform.machine()


SAMPLED_EVERY = 10
"""Transfers are timed in one interval of this number, and in the first ``SAMPLED_FIRST`` ones."""
SAMPLED_FIRST = 3


class TransferSampling:
    """Decides in which intervals of a GPU transfers are timed, and estimates their times in the others."""

    def __init__(self) -> None:
        self._is_on = True
        """Whether transfers are timed now."""
        self._was_on = True
        """Whether they were in the interval that has ended."""
        self._intervals = 0
        self._shares: dict[str, dict[str, float]] = {}
        """Shares of each phase in which this rank only waited, by kind of transfer, in the last sampled interval."""
        self._flight: dict[str, float] = {}
        """Seconds in flight per call of each kind of transfer, in the last sampled interval."""

    def end_interval(self) -> bool:
        """An interval ends; return whether to time the transfers of the next one."""
        self._intervals += 1
        self._was_on = self._is_on
        self._is_on = self._intervals < SAMPLED_FIRST or self._intervals % SAMPLED_EVERY == 0
        return self._is_on

    def complete(self, times: StepTimes, exposed: Mapping[tuple[str, str], float]) -> None:
        """Store the shares of a sampled interval, or divide the phases of another one by the stored shares.

        ``exposed``: seconds in which this rank only waited, by phase and transfer.
        """
        if not self._was_on:
            return self._estimate(times)
        all_seconds = dict(times.phases)
        for (phase, _), seconds in exposed.items():
            all_seconds[phase] = all_seconds.get(phase, 0.0) + seconds
        self._shares = {}
        for (phase, name), seconds in exposed.items():
            self._shares.setdefault(phase, {})[name] = seconds / all_seconds[phase] if all_seconds[phase] else 0.0
        self._flight = {name: traffic.in_flight / max(traffic.calls, 1) for name, traffic in times.traffic.items()}

    def _estimate(self, times: StepTimes) -> None:
        for phase, seconds in list(times.phases.items()):
            for name, share in self._shares.get(phase, {}).items():
                if name in times.traffic:
                    times.phases[phase] -= share * seconds
                    times.traffic[name].exposed += share * seconds
        for name, traffic in times.traffic.items():
            traffic.in_flight = max(traffic.in_flight, traffic.calls * self._flight.get(name, 0.0))
