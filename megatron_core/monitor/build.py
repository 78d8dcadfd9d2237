"""Create the sinks of a run from its settings."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_core.config import RunConfig
from megatron_core.config.monitor import MonitorConfig
from megatron_core.feature import load_hook, used_features
from megatron_core.monitor.events import Sink
from megatron_core.monitor.jsonl import JsonLinesSink


@dataclass(frozen=True)
class SinkContext:
    """The arguments of ``Feature.sink``."""

    config: RunConfig
    """The settings of the run."""
    folder: Path | None = None
    """The folder of its checkpoints."""
    start_iteration: int = 0
    """The iteration from which the run continues."""
    logged: Mapping[str, Any] = field(default_factory=dict)
    """Settings to store with the metrics."""

    @property
    def metrics_path(self) -> Path | None:
        """Path of the metrics file."""
        return metrics_path(self.config.monitor, self.folder)


def build_sinks(context: SinkContext) -> list[Sink]:
    """Create the metrics file, if it is set or checkpoints are saved, and the sinks of features.

    Call it on the reporting rank.
    """
    path = context.metrics_path
    sinks: list[Sink] = [] if path is None else [JsonLinesSink(path)]
    hooks = (feature.sink for feature in used_features(context.config) if feature.sink is not None)
    return sinks + [load_hook(hook)(context) for hook in hooks]


def metrics_path(config: MonitorConfig, save_dir: str | Path | None) -> Path | None:
    """Path of the metrics file: ``metrics_file``, or ``metrics.jsonl`` in ``save_dir``."""
    if config.metrics_file is not None:
        return Path(config.metrics_file)
    return None if save_dir is None else Path(save_dir) / "metrics.jsonl"
