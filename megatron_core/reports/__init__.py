"""Reports about a run: checks of its state, profiles, records of hashes, plots, pages, programs that show metrics."""

from megatron_core.feature import Feature

FEATURES = (
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
