"""Runs that survive failures: recovery, elastic restarts, checks of links, bad and repeated steps, logged failures."""

from megatron_core.feature import Feature
from megatron_core.resilience import rules
from megatron_core.resilience.settings import ElasticConfig, FaultConfig, LinkCheckConfig, RecoveryConfig, RerunConfig

FEATURES = (
    Feature(
        name="hang_reports",
        is_used=lambda config: True,
        rank_monitor="megatron_core.resilience.watchdog:Watchdog",
    ),
    Feature(
        name="failure_log",
        is_used=lambda config: config.checkpoint.save is not None and not config.training.skip_train,
        callbacks=("megatron_core.resilience.failure_log:FailureLog",),
    ),
    Feature(
        name="bad_steps",
        is_used=lambda config: not config.training.skip_train,
        callbacks=("megatron_core.resilience.bad_steps:BadSteps",),
    ),
    Feature(
        name="elastic_runs",
        settings=ElasticConfig,
        is_used=rules.trains_elastic,
        problems=rules.elastic_problems,
        start="megatron_core.resilience.elastic:start_elastic",
        run_part="megatron_core.resilience.elastic:ElasticNotes",
        callbacks=("megatron_core.resilience.elastic:ElasticEnd",),
    ),
    Feature(
        name="recovery",
        settings=RecoveryConfig,
        is_used=rules.recovers,
        problems=rules.recovery_problems,
        start="megatron_core.resilience.recovery:start_with_recovery",
    ),
    Feature(
        name="link_checks",
        settings=LinkCheckConfig,
        is_used=rules.checks_links,
        callbacks=("megatron_core.resilience.link_checks:LinkChecks",),
    ),
    Feature(
        name="reruns",
        settings=RerunConfig,
        is_used=rules.repeats_steps,
        callbacks=("megatron_core.resilience.rerun:Reruns",),
    ),
    Feature(
        name="faults",
        settings=FaultConfig,
        is_used=rules.injects_faults,
        problems=rules.fault_problems,
        callbacks=("megatron_core.resilience.faults:Faults",),
    ),
)
