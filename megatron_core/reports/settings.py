"""Settings of checks, profiles, records of hashes, and programs that show metrics."""

from dataclasses import dataclass
from typing import Literal

from megatron_core.config import conditions as c
from megatron_core.config import ranges as r
from megatron_core.config.monitor import MonitorConfig
from megatron_core.config.setting import ALWAYS, given, section, setting, unless
from megatron_core.feature import Feature

RECORD_TIMES = unless("--no-record-times", lambda run: not run.monitor.record_times)


@dataclass(frozen=True, kw_only=True)
@section()
class MeasurementConfig(MonitorConfig):
    """Times of the phases of a step."""

    record_times: bool = setting(True, when=ALWAYS)
    """Record the time of each phase of a step and the memory of each rank, in the console line, the metrics and the
    folder metrics.ranks next to the metrics file; --no-record-times turns it off."""
    peak_tflops: float | None = setting(None, r.POSITIVE, when=RECORD_TIMES)
    """Peak rate of a rank's matrix products in TFLOP/s, relative to which utilization is reported; default: measured
    for 30 ms at the first start of the run and stored with its records."""
    timing_log_level: Literal[0, 1, 2] = setting(0, needs=RECORD_TIMES)
    """Print times of all ranks every --log-interval steps. 0: none. 1: phases of the step. 2: also the waiting time for
    each kind of collective."""
    timing_log_option: Literal["max", "minmax", "all"] = setting("minmax", when=given("timing_log_level", "1"))
    """Printed times. max: the longest. minmax: the shortest and the longest. all: the times of all ranks."""
    log_straggler: bool = setting(False, needs=RECORD_TIMES)
    """Print the slowest and the fastest ranks every --log-interval steps."""
    straggler_minmax_count: int = setting(1, r.COUNT, when=given("log_straggler"))
    """Number of slowest and of fastest ranks that --log-straggler prints."""


@dataclass(frozen=True, kw_only=True)
@section()
class PipelineTraceConfig(MonitorConfig):
    """Times of the actions of a pipeline."""

    trace_pipeline: str | None = setting(None, r.FOLDER, when=ALWAYS)
    """Folder for the times of each rank's forwards and backwards in the first 20 steps; megatron-show-schedule
    --measured draws them. On GPUs these steps are slower, because each measurement synchronizes."""


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


@dataclass(frozen=True, kw_only=True)
@section()
class CheckConfig:
    """Checks of the state during training."""

    replica_check_interval: int | None = setting(
        100, r.COUNT, when=c.SEVERAL_RANKS, aliases="check_weight_hash_across_dp_replicas_interval"
    )
    """Steps between checks that all copies of weights are equal to the bit, which also run before the first and after
    the last step. None: no checks."""


@dataclass(frozen=True, kw_only=True)
@section(when=given("profile"))
class ProfileConfig:
    """Times of pipeline actions, collectives and phases in some steps."""

    profile: bool = setting(False, needs=RECORD_TIMES)
    """Write a Perfetto trace of some steps of all ranks: pipeline actions, collectives and phases."""
    profile_step_start: int = setting(10)
    """With --profile: last step before the trace."""
    profile_step_end: int = setting(12)
    """With --profile: the last step of the trace."""
    profile_ranks: tuple[int, ...] = setting(())
    """With --profile: ranks to trace; default: all."""
    profile_dir: str | None = setting(None, r.FOLDER)
    """With --profile: folder for the ranks' files and the merged trace.json; default: profile in the --save folder."""
    use_pytorch_profiler: bool = setting(False)
    """With --profile: add operations and kernels from torch.profiler; these steps are slower."""
    pytorch_profiler_collect_shapes: bool = setting(False, when=given("use_pytorch_profiler"))
    """With --use-pytorch-profiler: record the shapes of operations' inputs."""
    pytorch_profiler_collect_callstack: bool = setting(False, when=given("use_pytorch_profiler"))
    """With --use-pytorch-profiler: record the Python call stack of each operation."""


@dataclass(frozen=True, kw_only=True)
@section(when=given("record_hashes"))
class HashConfig:
    """Records of hashes of each step."""

    record_hashes: bool = setting(False, when=ALWAYS)
    """Write losses, gradient norms and hashes of gradients, optimizer state and weights of each step to
    metrics.hashes.jsonl next to the metrics file. The hashes do not depend on the layout; megatron-compare-hashes finds
    the first difference of two runs."""
    record_hashes_interval: int = setting(1, r.COUNT)
    """With --record-hashes: steps between records. The end of a run reports their share of the processor time."""
    record_hashes_by_tensor: bool = setting(False)
    """With --record-hashes: also write the hash of each tensor, so that a difference can be located."""


def metric_sink(name: str, settings: type, destination: str, sink: str) -> Feature:
    """A feature that sends metrics to the ``destination``, a setting of its section."""
    return Feature(
        name=name,
        settings=settings,
        is_used=lambda config: config.value(destination) is not None,
        in_any_model=True,
        sink=f"megatron_core.reports.metric_sinks:{sink}",
    )
