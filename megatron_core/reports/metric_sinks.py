"""Metrics for TensorBoard under Megatron-LM's tags, and with these tags for Prometheus, Weights & Biases and MLflow.

The libraries of other programs are imported only when their sink is created.
"""

import errno
import importlib
import math
import os
import re
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatron_core.errors import ConfigError, first_line
from megatron_core.monitor.events import ExpertLoad, StepEvent, ValidationEvent
from megatron_core.monitor.sinks import SinkContext
from megatron_core.output_file import Kind, make_folder, refuse_other_file
from megatron_core.prepared_output import no_follow_new
from megatron_core.reports.settings import MlflowConfig, PrometheusConfig, TensorBoardConfig, WandbConfig


class TensorBoardSink:
    """Writes the scalars of every step."""

    setting = "tensorboard_dir"

    def __init__(self, folder: str | Path, *, start_iteration: int = 0) -> None:
        """Open ``folder``; events of an earlier run after ``start_iteration`` are hidden."""
        self._folder = Path(folder)
        try:
            self._open(start_iteration + 1 if start_iteration else None)
        except OSError as error:
            raise ConfigError(f"tensorboard_dir={str(folder)!r} cannot be written: {error}; give another") from None

    def _open(self, purge_step: int | None = None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        make_folder(self._folder)
        self._writer = SummaryWriter(log_dir=str(self._folder), purge_step=purge_step)

    def on_step(self, event: StepEvent) -> None:
        """Write one step, including NaN, which TensorBoard marks."""
        if not self._folder.is_dir():
            self._open()  # it was deleted
        for tag, value in scalars(event).items():
            self._writer.add_scalar(tag, value, event.iteration)
        self._writer.add_scalar("lm loss vs samples", event.loss, event.consumed_samples)

    def on_validation(self, event: ValidationEvent) -> None:
        """Write one evaluation."""
        for tag, value in event.scalars.items():
            self._writer.add_scalar(tag, value, event.iteration)
            self._writer.add_scalar(f"{tag} vs samples", value, event.consumed_samples)
        self._writer.flush()

    def close(self) -> None:
        """Flush and close."""
        self._writer.close()


def open_tensorboard(context: SinkContext) -> TensorBoardSink:
    """Create the sink of a run."""
    folder = context.config.section(TensorBoardConfig).tensorboard_dir
    return TensorBoardSink(str(folder), start_iteration=context.start_iteration)


def scalars(event: StepEvent) -> dict[str, float]:
    """Scalars of a step by Megatron-LM's tags."""
    values = {
        "learning-rate": event.learning_rate,
        "batch-size": event.global_batch_size,
        "lm loss": event.loss,
        "loss-scale": event.loss_scale,
        "grad-norm": event.grad_norm,
        "params-norm": event.params_norm,
        "num-zeros": event.num_zeros_in_grad,
        "iteration-time": event.elapsed_ms / 1000.0,
        "throughput": event.model_flops_per_second / 1e12,
        "tokens-per-second": event.tokens_per_second,
        "mem-max-allocated-bytes": event.memory_bytes,
        "utilisation": event.utilisation,
        "goodput": event.goodput,
        **{f"time/{name}": seconds for name, seconds in event.phases.items()},
        **{f"memory/{category}": size for category, size in event.memory.items()},
        **event.auxiliary_losses,
        **event.breakdown,
    }
    loads = [ExpertLoad.of(numbers) for numbers in event.expert_load.values()]
    if loads:  # of the layer with the most unequal load
        values["expert-load-max-over-mean"] = max(load.max_over_mean for load in loads)
        values["expert-load-min-over-mean"] = min(min(load.tokens) / max(load.mean, 1e-9) for load in loads)
        values["expert-load-entropy"] = min(load.entropy for load in loads)
    return {tag: value for tag, value in values.items() if value is not None}


_METRICS = Kind(
    "metrics file written by a run",
    lambda data: all(line.startswith(b"megatron_") for line in data.removesuffix(b"\n").split(b"\n")),
)


class PrometheusSink:
    """Replaces its file atomically after each step; the label ``run`` is the file's name without suffix.

    Without this label a node exporter would drop the metrics of all runs of a machine but one.
    """

    setting = "prometheus_file"

    def __init__(self, path: str | Path, *, start_iteration: int = 0) -> None:
        self._path = Path(path)
        self._values: dict[str, float] = {"iteration": start_iteration}
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
        counted = {
            "iteration": event.iteration,
            "total-iterations": event.total_iterations,
            "consumed-samples": event.consumed_samples,
        }
        self._values |= scalars(event) | counted
        self._write()

    def on_validation(self, event: ValidationEvent) -> None:
        """Write one evaluation."""
        self._values |= {name: value for name, value in event.scalars.items() if not name.endswith(" ppl")}
        self._write()

    def close(self) -> None:
        """Keep the last values in the file."""

    def _write(self) -> None:
        lines = {series(tag, self._path.stem): _number(value) for tag, value in self._values.items()}
        make_folder(self._path.parent)  # it may have been deleted
        new = self._path.with_name(f".{self._path.name}.new")
        with open(new, "w", encoding="utf-8", errors="replace", opener=no_follow_new) as file:
            file.write("".join(f"{name} {value}\n" for name, value in lines.items()))
        new.replace(self._path)


def open_prometheus(context: SinkContext) -> PrometheusSink:
    """Create the sink of a run; ``ConfigError`` if its file is also the metrics file."""
    file = str(context.config.section(PrometheusConfig).prometheus_file)
    metrics = context.metrics_path
    if metrics is not None and os.path.realpath(metrics) == os.path.realpath(file):
        raise ConfigError(f"prometheus_file={file!r} is also the metrics file; give another file")
    return PrometheusSink(file, start_iteration=context.start_iteration)


def series(tag: str, run: str) -> str:
    """Name and labels of a tag, such as ``megatron_time{run="gpt",part="forward"}`` for ``time/forward``."""
    name, slash, label = tag.partition("/")
    labels = {"run": run, "part": label} if slash else {"run": run}
    quoted = (f'{key}="{value.translate(_ESCAPES)}"' for key, value in labels.items())
    legal_name = "megatron_" + re.sub(r"[^a-zA-Z0-9]+", "_", name).strip("_").lower()
    return f"{legal_name}{{{','.join(quoted)}}}"


_ESCAPES = str.maketrans({"\\": r"\\", '"': r"\"", "\n": r"\n"})


def _number(value: float) -> str:
    return repr(float(value)) if math.isfinite(value) else {math.inf: "+Inf", -math.inf: "-Inf"}.get(value, "NaN")


class WandbSink:
    """Logs every step to the project of ``--wandb-project``; ``WANDB_MODE=offline`` keeps it on this machine."""

    setting = "wandb_project"

    def __init__(self, context: SinkContext) -> None:
        """Start a run; its files are in ``wandb_save_dir``, by default ``wandb`` in the folder of the checkpoints."""
        config = context.config.section(WandbConfig)
        try:
            wandb = importlib.import_module("wandb")
        except ImportError as error:
            raise ConfigError(
                f"wandb_project={config.wandb_project} needs the package wandb; pip install wandb, or remove the flag"
            ) from error
        folder = config.wandb_save_dir or (None if context.folder is None else str(context.folder / "wandb"))
        if folder is not None:
            make_folder(folder)
        names = {"project": config.wandb_project, "name": config.wandb_exp_name, "entity": config.wandb_entity}
        try:
            self._run = wandb.init(**names, dir=folder, config=dict(context.logged))
        except Exception as error:  # various types: no login, no network, an illegal name
            raise ConfigError(
                f"wandb_project={config.wandb_project}: Weights & Biases cannot start a run ({first_line(error)}); log "
                "in with wandb login, set WANDB_MODE=offline to keep the run on this machine, or remove the flag"
            ) from error

    def on_step(self, event: StepEvent) -> None:
        """Log one step."""
        self._run.log(scalars(event) | {"samples": event.consumed_samples}, step=event.iteration)

    def on_validation(self, event: ValidationEvent) -> None:
        """Log one evaluation."""
        self._run.log(event.scalars, step=event.iteration)

    def close(self) -> None:
        """Upload pending data and end the run."""
        self._run.finish()


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

    def _log(self, values: Mapping[str, float], step: int) -> None:
        now = round(1000 * time.time())
        metrics = [self._entities.Metric(name, float(value), now, step) for name, value in values.items()]
        self._send(self._client.log_batch, metrics=metrics)

    def _send(self, call: Callable[..., object], **content: Any) -> None:
        """Send data of the run to the store. Errors: ``OSError``, which training survives, if it does not answer."""
        try:
            call(self._run, **content)
        except self._failure as error:
            raise OSError(errno.EIO, first_line(error)) from error
