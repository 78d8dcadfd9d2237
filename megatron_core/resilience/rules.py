"""When a run uses a feature of this package."""

from megatron_core.config.run import RunConfig


def trains_elastic(config: RunConfig) -> bool:
    """Whether the number of ranks may change."""
    return config.resilience.elastic


def recovers(config: RunConfig) -> bool:
    """Whether the processes of a run continue after a failure."""
    return config.resilience.recover != "none" and not config.training.skip_train


def checks_links(config: RunConfig) -> bool:
    """Whether checksums of transfers are compared."""
    checks = config.monitor.link_check_interval is not None or config.monitor.check_pipeline_messages
    return checks and not config.training.skip_train


def repeats_steps(config: RunConfig) -> bool:
    """Whether steps are computed again, to find wrong results."""
    settings = config.resilience
    repeats = settings.rerun_mode != "disabled" or settings.replay_interval is not None
    return repeats and not config.training.skip_train


def injects_faults(config: RunConfig) -> bool:
    """Whether faults are injected."""
    return bool(config.resilience.inject_fault) and not config.training.skip_train
