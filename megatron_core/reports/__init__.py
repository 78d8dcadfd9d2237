"""Reports about a run: checks of its state, profiles, records of hashes, plots, pages, programs that show metrics."""

from megatron_core.feature import Feature
from megatron_core.reports.rules import hash_problems, profile_problems
from megatron_core.reports.settings import (
    CheckConfig,
    HashConfig,
    MeasurementConfig,
    MlflowConfig,
    PipelineTraceConfig,
    ProfileConfig,
    PrometheusConfig,
    TensorBoardConfig,
    WandbConfig,
    metric_sink,
)

FEATURES = (
    Feature(
        name="megatron_lines",
        is_used=lambda config: config.monitor.log_format == "megatron",
        sink="megatron_core.reports.megatron_lines:open_console",
    ),
    metric_sink("tensorboard", TensorBoardConfig, "tensorboard_dir", "open_tensorboard"),
    metric_sink("prometheus", PrometheusConfig, "prometheus_file", "open_prometheus"),
    metric_sink("wandb", WandbConfig, "wandb_project", "WandbSink"),
    metric_sink("mlflow", MlflowConfig, "mlflow_experiment", "MlflowSink"),
    Feature(
        name="measurements",
        settings=MeasurementConfig,
        is_used=lambda config: (
            config.monitor.section(MeasurementConfig).record_times and not config.training.skip_train
        ),
        callbacks=("megatron_core.reports.measurements:Measurements",),
    ),
    Feature(
        name="pipeline_trace",
        settings=PipelineTraceConfig,
        is_used=lambda config: config.value("trace_pipeline") is not None,
        callbacks=("megatron_core.reports.pipeline_trace:PipelineTrace",),
    ),
    Feature(
        name="memory",
        is_used=lambda config: not config.training.skip_train,
        run_part="megatron_core.reports.memory_report:MemoryPrediction",
        callbacks=(
            "megatron_core.reports.memory_report:MemorySnapshots",
            "megatron_core.reports.memory_report:MemoryReport",
        ),
    ),
    Feature(
        name="checks",
        settings=CheckConfig,
        is_used=lambda config: not config.training.skip_train,
        callbacks=("megatron_core.reports.checks:RunChecks",),
    ),
    Feature(
        name="profiling",
        settings=ProfileConfig,
        problems=profile_problems,
        is_used=lambda config: config.section(ProfileConfig).profile and not config.training.skip_train,
        callbacks=("megatron_core.reports.profile:Profile",),
    ),
    Feature(
        name="hash_records",
        settings=HashConfig,
        problems=hash_problems,
        is_used=lambda config: config.section(HashConfig).record_hashes and not config.training.skip_train,
        callbacks=("megatron_core.reports.state_hashes:HashRecords",),
    ),
)
