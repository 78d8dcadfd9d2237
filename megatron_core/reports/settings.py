"""Settings of the programs that show metrics, and their features."""

from dataclasses import dataclass

from megatron_core.config import ranges as r
from megatron_core.config.setting import ALWAYS, given, section, setting
from megatron_core.feature import Feature


@dataclass(frozen=True, kw_only=True)
@section(when=ALWAYS)
class TensorBoardConfig:
    """Metrics for TensorBoard."""

    tensorboard_dir: str | None = setting(None, r.FOLDER)
    """Folder for TensorBoard event files."""


@dataclass(frozen=True, kw_only=True)
@section(when=ALWAYS)
class PrometheusConfig:
    """Metrics for Prometheus."""

    prometheus_file: str | None = setting(None, r.FILE)
    """File for the last step's metrics in Prometheus' text format, for the textfile collector of the node exporter."""


@dataclass(frozen=True, kw_only=True)
@section(when=given("wandb_project", "NAME"))
class WandbConfig:
    """Metrics for Weights & Biases."""

    wandb_project: str | None = setting(None, when=ALWAYS, aliases="wandb_project_name")
    """Project of Weights & Biases for metrics; needs the package wandb. With WANDB_MODE=offline they stay on this
    machine."""
    wandb_exp_name: str | None = setting(None)
    """Name of the run in Weights & Biases."""
    wandb_entity: str | None = setting(None, aliases="wandb_entity_name")
    """User or team that owns the project."""
    wandb_save_dir: str | None = setting(None)
    """Folder for files of Weights & Biases; default: wandb in the --save folder."""


@dataclass(frozen=True, kw_only=True)
@section(when=given("mlflow_experiment", "NAME"))
class MlflowConfig:
    """Metrics for MLflow."""

    mlflow_experiment: str | None = setting(None, when=ALWAYS)
    """Experiment of MLflow for metrics; needs the packages mlflow-skinny, sqlalchemy and alembic."""
    mlflow_run_name: str | None = setting(None)
    """Name of the run in MLflow."""
    mlflow_tracking_uri: str | None = setting(None)
    """Store of MLflow, as http://HOST:PORT or sqlite:///PATH; default: the file mlflow.db in the --save folder."""


def metric_sink(settings: type, destination: str, hook: str) -> Feature:
    """A feature that sends metrics to the ``destination``, a setting of its section."""
    return Feature(
        name=hook.partition(":")[0].rpartition(".")[2],
        settings=settings,
        is_used=lambda config: config.value(destination) is not None,
        in_any_model=True,
        sink=hook,
    )
