"""Create the sinks of a run from its settings."""

import os.path
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_core.config.monitor import MonitorConfig
from megatron_core.errors import ConfigError
from megatron_core.monitor.console import ConsoleSink
from megatron_core.monitor.events import Sink
from megatron_core.monitor.jsonl import JsonLinesSink


def build_sinks(
    config: MonitorConfig,
    save_dir: str | Path | None = None,
    *,
    start_iteration: int = 0,
    settings: Mapping[str, Any] | None = None,
) -> list[Sink]:
    """Create the console, the metrics file (if it is set or checkpoints are saved), and the other configured sinks.

    Call it on the reporting rank. ``start_iteration``: the iteration from which the run continues. ``settings``: the
    settings of the run, for Weights & Biases and MLflow.
    """
    sinks: list[Sink] = [
        ConsoleSink(
            config.log_interval,
            megatron=config.log_format == "megatron",
            progress=config.progress,
            quiet=config.quiet,
        )
    ]
    path = metrics_path(config, save_dir)
    if path is not None:
        sinks.append(JsonLinesSink(path))
    if config.prometheus_file is not None:
        if path is not None and os.path.realpath(path) == os.path.realpath(config.prometheus_file):
            raise ConfigError(f"prometheus_file={config.prometheus_file!r} is also the metrics file; give another file")
        from megatron_core.monitor.prometheus import PrometheusSink

        sinks.append(PrometheusSink(config.prometheus_file))
    if config.tensorboard_dir is not None:
        from megatron_core.monitor.tensorboard import TensorBoardSink

        sinks.append(TensorBoardSink(config.tensorboard_dir, start_iteration=start_iteration))
    if config.wandb_project is not None:
        from megatron_core.monitor.wandb import WandbSink

        sinks.append(WandbSink(config, save_dir, settings or {}))
    if config.mlflow_experiment is not None:
        from megatron_core.monitor.mlflow import MlflowSink

        sinks.append(MlflowSink(config, save_dir, settings or {}))
    return sinks


def metrics_path(config: MonitorConfig, save_dir: str | Path | None) -> Path | None:
    """Path of the metrics file: ``metrics_file``, or ``metrics.jsonl`` in ``save_dir``."""
    if config.metrics_file is not None:
        return Path(config.metrics_file)
    return None if save_dir is None else Path(save_dir) / "metrics.jsonl"
