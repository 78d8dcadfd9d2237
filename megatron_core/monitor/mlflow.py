"""Metrics for MLflow under the same names as for TensorBoard."""

import errno
import importlib
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_core.config.monitor import MonitorConfig
from megatron_core.errors import ConfigError
from megatron_core.monitor.events import StepEvent, ValidationEvent
from megatron_core.monitor.tensorboard import scalars
from megatron_core.output_file import make_folder

MOST_PARAMETERS, LONGEST = 100, 500
"""Parameters of one call, and characters of one, that every store of MLflow takes."""


class MlflowSink:
    """Logs every step to a new run of ``--mlflow-experiment``, in the store of ``--mlflow-tracking-uri``."""

    setting = "mlflow_experiment"

    def __init__(self, config: MonitorConfig, save_dir: str | Path | None, settings: Mapping[str, Any]) -> None:
        """Start a run with the ``settings`` of the training; by default in ``mlflow.db`` beside the checkpoints, or in
        the current folder."""
        try:
            mlflow = importlib.import_module("mlflow")
        except ImportError as error:
            raise ConfigError(
                f"mlflow_experiment={config.mlflow_experiment} needs the package mlflow; pip install mlflow-skinny "
                "sqlalchemy alembic, or remove the flag"
            ) from error
        self._entities, self._failure = mlflow.entities, mlflow.exceptions.MlflowException
        folder = Path(save_dir or ".").absolute()
        make_folder(folder)
        store = config.mlflow_tracking_uri or f"sqlite:///{folder / 'mlflow.db'}"
        self._client = mlflow.MlflowClient(tracking_uri=store)
        known = self._client.get_experiment_by_name(config.mlflow_experiment)
        experiment = self._client.create_experiment(config.mlflow_experiment) if known is None else known.experiment_id
        self._run = self._client.create_run(experiment, run_name=config.mlflow_run_name).info.run_id
        parameters = [self._entities.Param(name, str(value)[:LONGEST]) for name, value in settings.items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(self._run, params=parameters[first : first + MOST_PARAMETERS])

    def on_step(self, event: StepEvent) -> None:
        """Log one step."""
        self._log(scalars(event) | {"samples": event.consumed_samples}, event.iteration)

    def on_validation(self, event: ValidationEvent) -> None:
        """Log one evaluation."""
        name = f"lm loss {event.split}"
        self._log({name: event.loss, f"{name} ppl": event.perplexity}, event.iteration)

    def close(self) -> None:
        """End the run."""
        self._told(self._client.set_terminated)

    def _log(self, values: Mapping[str, float | None], step: int) -> None:
        now = round(1000 * time.time())
        metrics = [self._entities.Metric(name, float(v), now, step) for name, v in values.items() if v is not None]
        self._told(self._client.log_batch, metrics=metrics)

    def _told(self, call: Callable[..., object], **given: Any) -> None:
        """Tell the store about the run. Errors: ``OSError``, which a training survives, where it does not answer."""
        try:
            call(self._run, **given)
        except self._failure as error:
            raise OSError(errno.EIO, str(error).partition("\n")[0]) from error
