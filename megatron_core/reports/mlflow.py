"""Metrics for MLflow with the tags of TensorBoard."""

import errno
import importlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_core.errors import ConfigError, first_line
from megatron_core.monitor.build import SinkContext
from megatron_core.monitor.events import StepEvent, ValidationEvent
from megatron_core.output_file import make_folder
from megatron_core.reports.settings import MlflowConfig
from megatron_core.reports.tensorboard import scalars

MOST_PARAMETERS, LONGEST = 100, 500
"""Maximum number of parameters per call and of characters per parameter that all stores of MLflow accept."""

HTTP = {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2", "MLFLOW_HTTP_REQUEST_TIMEOUT": "10"}
"""Defaults for a server that does not answer; MLflow's defaults would block training for several minutes."""


class MlflowSink:
    """Logs every step to a new run of ``--mlflow-experiment``, in the store of ``--mlflow-tracking-uri``."""

    setting = "mlflow_experiment"

    def __init__(self, context: SinkContext) -> None:
        """Start a run; by default in ``mlflow.db`` in the folder of the checkpoints or the current folder."""
        config = context.config.section(MlflowConfig)
        try:
            mlflow = importlib.import_module("mlflow")
        except ImportError as error:
            raise ConfigError(
                f"mlflow_experiment={config.mlflow_experiment} needs the package mlflow; pip install mlflow-skinny "
                "sqlalchemy alembic, or remove the flag"
            ) from error
        self._entities = mlflow.entities
        self._failure = mlflow.exceptions.MlflowException
        for name, value in HTTP.items():
            os.environ.setdefault(name, value)
        folder = (context.folder or Path()).absolute()
        make_folder(folder)
        store = config.mlflow_tracking_uri or f"sqlite:///{folder / 'mlflow.db'}"
        try:
            self._client = mlflow.MlflowClient(tracking_uri=store)
            self._run = self._start(config, context.logged)
        except Exception as error:  # various types: no such store, no answer, an illegal name
            raise ConfigError(
                f"mlflow_tracking_uri={config.mlflow_tracking_uri} and mlflow_experiment={config.mlflow_experiment}: "
                f"MLflow cannot start a run ({first_line(error)}); give a store such as sqlite:///mlflow.db or the "
                "http address of a running server, or remove the flags"
            ) from error

    def _start(self, config: MlflowConfig, settings: Mapping[str, Any]) -> str:
        """Start a run with ``settings``; return its identifier."""
        known = self._client.get_experiment_by_name(config.mlflow_experiment)
        experiment = self._client.create_experiment(config.mlflow_experiment) if known is None else known.experiment_id
        run: str = self._client.create_run(experiment, run_name=config.mlflow_run_name).info.run_id
        parameters = [self._entities.Param(name, str(value)[:LONGEST]) for name, value in settings.items()]
        for first in range(0, len(parameters), MOST_PARAMETERS):
            self._client.log_batch(run, params=parameters[first : first + MOST_PARAMETERS])
        return run

    def on_step(self, event: StepEvent) -> None:
        """Log one step."""
        self._log(scalars(event) | {"samples": event.consumed_samples}, event.iteration)

    def on_validation(self, event: ValidationEvent) -> None:
        """Log one evaluation."""
        self._log(event.scalars, event.iteration)

    def close(self) -> None:
        """End the run."""
        self._send(self._client.set_terminated)

    def _log(self, values: Mapping[str, float | None], step: int) -> None:
        now = round(1000 * time.time())
        metrics = [self._entities.Metric(name, float(v), now, step) for name, v in values.items() if v is not None]
        self._send(self._client.log_batch, metrics=metrics)

    def _send(self, call: Callable[..., object], **content: Any) -> None:
        """Send data of the run to the store. Errors: ``OSError``, which training survives, if it does not answer."""
        try:
            call(self._run, **content)
        except self._failure as error:
            raise OSError(errno.EIO, first_line(error)) from error
