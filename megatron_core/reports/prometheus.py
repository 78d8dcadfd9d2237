"""Metrics of the last step in Prometheus's text format, for the textfile collector of the node exporter."""

import math
import os.path
import re
from pathlib import Path

from megatron_core.errors import ConfigError
from megatron_core.monitor.build import SinkContext
from megatron_core.monitor.events import StepEvent, ValidationEvent
from megatron_core.output_file import Kind, make_folder, no_follow_new, refuse_other_file
from megatron_core.reports.settings import PrometheusConfig
from megatron_core.reports.tensorboard import scalars

_METRICS = Kind(
    "metrics file written by a run",
    lambda data: all(line.startswith(b"megatron_") for line in data.removesuffix(b"\n").split(b"\n")),
)


class PrometheusSink:
    """Replaces its file atomically after each step."""

    setting = "prometheus_file"

    def __init__(self, path: str | Path) -> None:
        self._path = Path(path)
        self._values = dict[str, float]()
        try:
            make_folder(self._path.parent)
            if self._path.exists() and not self._path.is_file():
                raise OSError("it exists and is not a regular file")
            refuse_other_file(f"prometheus_file={str(path)!r}", path, _METRICS)
            self._write()
        except OSError as error:
            raise ConfigError(f"prometheus_file={str(path)!r} cannot be written: {error}; give another file") from None

    def on_step(self, event: StepEvent) -> None:
        """Write one step."""
        counted = {"iteration": event.iteration, "consumed-samples": event.consumed_samples}
        self._values |= {name: v for name, v in (scalars(event) | counted).items() if v is not None}
        self._write()

    def on_validation(self, event: ValidationEvent) -> None:
        """Write one evaluation."""
        self._values |= {name: value for name, value in event.scalars.items() if not name.endswith(" ppl")}
        self._write()

    def close(self) -> None:
        """Keep the last values in the file."""

    def _write(self) -> None:
        lines = [f"{metric_name(name)} {_number(value)}" for name, value in self._values.items()]
        make_folder(self._path.parent)  # it may have been deleted
        new = self._path.with_name(f".{self._path.name}.new")
        with open(new, "w", encoding="utf-8", opener=no_follow_new) as file:
            file.write("".join(f"{line}\n" for line in lines))
        new.replace(self._path)


def open_prometheus(context: SinkContext) -> PrometheusSink:
    """Create the sink of a run; ``ConfigError`` if its file is also the metrics file."""
    file = str(context.config.section(PrometheusConfig).prometheus_file)
    metrics = context.metrics_path
    if metrics is not None and os.path.realpath(metrics) == os.path.realpath(file):
        raise ConfigError(f"prometheus_file={file!r} is also the metrics file; give another file")
    return PrometheusSink(file)


def metric_name(name: str) -> str:
    """Convert to a legal name of letters, digits and underscores, such as ``megatron_lm_loss``."""
    return "megatron_" + re.sub(r"[^a-zA-Z0-9]+", "_", name).strip("_").lower()


def _number(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")
