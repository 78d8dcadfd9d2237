"""Reports about a run: checks of its state, profiles, records of hashes, plots, pages, programs that show metrics."""

from megatron_core.feature import Feature
from megatron_core.reports.settings import MlflowConfig, PrometheusConfig, TensorBoardConfig, WandbConfig, metric_sink

FEATURES = (
    metric_sink(TensorBoardConfig, "tensorboard_dir", "megatron_core.reports.tensorboard:open_tensorboard"),
    metric_sink(PrometheusConfig, "prometheus_file", "megatron_core.reports.prometheus:open_prometheus"),
    metric_sink(WandbConfig, "wandb_project", "megatron_core.reports.wandb:WandbSink"),
    metric_sink(MlflowConfig, "mlflow_experiment", "megatron_core.reports.mlflow:MlflowSink"),
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
        is_used=lambda config: not config.training.skip_train,
        callbacks=("megatron_core.reports.checks:RunChecks",),
    ),
    Feature(
        name="profile",
        is_used=lambda config: config.monitor.profile and not config.training.skip_train,
        callbacks=("megatron_core.reports.profile:Profile",),
    ),
    Feature(
        name="hash_records",
        is_used=lambda config: config.monitor.record_hashes and not config.training.skip_train,
        callbacks=("megatron_core.reports.hash_callback:HashRecords",),
    ),
)
