"""Reports about a run: checks of its state, profiles, records of hashes, plots, pages, programs that show metrics."""

from megatron_core.feature import Feature
from megatron_core.reports.settings import MlflowConfig, PrometheusConfig, TensorBoardConfig, WandbConfig

FEATURES = (
    Feature(
        name="tensorboard",
        settings=TensorBoardConfig,
        is_used=lambda config: config.section(TensorBoardConfig).tensorboard_dir is not None,
        in_any_model=True,
        sink="megatron_core.reports.tensorboard:open_tensorboard",
    ),
    Feature(
        name="prometheus",
        settings=PrometheusConfig,
        is_used=lambda config: config.section(PrometheusConfig).prometheus_file is not None,
        in_any_model=True,
        sink="megatron_core.reports.prometheus:open_prometheus",
    ),
    Feature(
        name="wandb",
        settings=WandbConfig,
        is_used=lambda config: config.section(WandbConfig).wandb_project is not None,
        in_any_model=True,
        sink="megatron_core.reports.wandb:WandbSink",
    ),
    Feature(
        name="mlflow",
        settings=MlflowConfig,
        is_used=lambda config: config.section(MlflowConfig).mlflow_experiment is not None,
        in_any_model=True,
        sink="megatron_core.reports.mlflow:MlflowSink",
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
