"""Metrics of ``transformers.Trainer`` in the files of this project's runs.

trainer = transformers.Trainer(..., callbacks=[MetricsCallback(metrics_file="run/metrics.jsonl")])
"""

import time
from dataclasses import fields
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from megatron_core.config import MonitorConfig, RunConfig
from megatron_core.feature import features
from megatron_core.monitor.device import peak_memory_bytes
from megatron_core.monitor.events import Sink, StepEvent, ValidationEvent
from megatron_core.monitor.sinks import LenientSink, SinkContext, build_sinks


class MetricsCallback(TrainerCallback):
    """Writes an event for each logged step and each evaluation, on the process that logs.

    ``settings``: ``metrics_file``, ``tensorboard_dir``, ``prometheus_file``, ``wandb_project``, ``mlflow_experiment``
    and others of ``MonitorConfig`` and of ``reports/settings.py``. Loss and time of a step are means over the steps
    since the last log, so use ``logging_steps=1`` for each step. ``megatron-plot-metrics`` and ``megatron-report`` read
    the file; tokens and FLOPs per second are 0, because they are unknown for a model of your own.
    Errors: ``ConfigError`` for a destination that cannot be written; a later failed write is one warning.
    """

    def __init__(self, **settings: Any) -> None:
        sections = [MonitorConfig, *(feature.settings for feature in features() if feature.sink is not None)]
        legal = {setting.name for section in sections if section is not None for setting in fields(section)}
        if foreign := sorted(settings.keys() - legal):
            raise TypeError(f"{', '.join(foreign)} is not a setting of metrics; legal: {', '.join(sorted(legal))}")
        self._config = RunConfig.from_flat(RunConfig().flat() | settings)
        self._sinks: list[Sink] = []
        self._began = 0.0
        self._last = 0

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Open the files."""
        self._began = time.perf_counter()
        self._last = state.global_step
        if state.is_world_process_zero and not self._sinks:
            context = SinkContext(self._config, start_iteration=state.global_step, logged=args.to_sanitized_dict())
            self._sinks = [LenientSink(sink) for sink in build_sinks(context)]

    def on_log(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **inputs: Any) -> None:
        """Write the step of a log with a loss."""
        steps = state.global_step - self._last
        logs = inputs.get("logs") or {}
        if "loss" not in logs or not steps:
            return
        now = time.perf_counter()
        seconds = (now - self._began) / steps
        self._began = now
        self._last = state.global_step
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        norm = logs.get("grad_norm")
        event = StepEvent(
            iteration=state.global_step,
            total_iterations=state.max_steps,
            consumed_samples=state.global_step * samples,
            consumed_tokens=state.num_input_tokens_seen,
            loss=float(logs["loss"]),
            learning_rate=float(logs.get("learning_rate", 0.0)),
            global_batch_size=samples,
            grad_norm=None if norm is None else float(norm),
            elapsed_ms=1000.0 * seconds,
            memory_bytes=peak_memory_bytes(),
            breakdown={"samples per second": samples / seconds},
        )
        for sink in self._sinks:
            sink.on_step(event)

    def on_evaluate(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **inputs: Any) -> None:
        """Write an evaluation; with several evaluation sets, one for each."""
        samples = args.train_batch_size * args.gradient_accumulation_steps * args.world_size
        for name, loss in (inputs.get("metrics") or {}).items():
            if name.startswith("eval_") and name.endswith("loss"):
                split = name.removeprefix("eval_").removesuffix("loss").strip("_") or "validation"
                event = ValidationEvent(
                    iteration=state.global_step,
                    loss=loss,
                    consumed_samples=state.global_step * samples,
                    consumed_tokens=state.num_input_tokens_seen,
                    split=split,
                )
                for sink in self._sinks:
                    sink.on_validation(event)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **_: Any) -> None:
        """Close the files."""
        for sink in self._sinks:
            sink.close()
        self._sinks = []
