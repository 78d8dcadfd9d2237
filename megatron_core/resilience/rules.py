"""When a run uses a feature of this package, and the rules for its settings."""

from collections.abc import Iterator

from megatron_core.config.parallel import compression_of
from megatron_core.config.rule_helpers import exclusive
from megatron_core.config.run import RunConfig
from megatron_core.resilience.settings import (
    FAULTS_OF_RANKS,
    FAULTS_ON_DISK,
    LINK_AXES,
    LINK_DAMAGES,
    LINK_DELAYS,
    MOST_FAULTS,
    ElasticConfig,
    Fault,
    FaultConfig,
    LinkCheckConfig,
    RecoveryConfig,
    RerunConfig,
)


def trains_elastic(config: RunConfig) -> bool:
    """Whether the number of ranks may change."""
    return config.section(ElasticConfig).elastic


def recovers(config: RunConfig) -> bool:
    """Whether the processes of a run continue after a failure."""
    return config.section(RecoveryConfig).recover != "none" and not config.training.skip_train


def checks_links(config: RunConfig) -> bool:
    """Whether checksums of transfers are compared."""
    settings = config.section(LinkCheckConfig)
    checks = settings.link_check_interval is not None or settings.check_pipeline_messages
    return checks and not config.training.skip_train


def repeats_steps(config: RunConfig) -> bool:
    """Whether steps are computed again, to find wrong results."""
    settings = config.section(RerunConfig)
    repeats = settings.rerun_mode != "disabled" or settings.replay_interval is not None
    return repeats and not config.training.skip_train


def injects_faults(config: RunConfig) -> bool:
    """Whether faults are injected."""
    return bool(config.section(FaultConfig).inject_fault) and not config.training.skip_train


def elastic_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings that a run needs, or cannot have, if the number of its ranks changes."""
    if not trains_elastic(config):
        return
    save, load = config.checkpoint.save, config.checkpoint.load
    if save is None or load != save:
        yield (
            f"elastic=True resumes from the run's own checkpoints, but save={str(save)[:200]} and "
            f"load={str(load)[:200]}; give both the same folder"
        )
    if config.training.global_batch_size is None and config.optional("rampup_batch_size") is None:
        yield (
            "elastic=True needs global_batch_size, which otherwise changes with the number of ranks; add "
            "--global-batch-size"
        )
    if config.training.skip_train:
        yield "elastic=True has no effect with skip_train=True; remove one of them"


def recovery_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings whose state or processes a recovery in the same processes does not cover."""
    settings = config.section(RecoveryConfig)
    if settings.recover == "none":
        return
    name = f"recover={settings.recover}"
    if trains_elastic(config):
        yield exclusive(name, "elastic=True")
    parallel = config.parallel
    training = config.training
    compression = compression_of(parallel)
    if compression is not None and compression.is_local:
        yield exclusive(name, f"grad_compression={compression.name}, whose ranks differ between synchronizations")
    if settings.recover_without_spare:
        name = "recover_without_spare=True"
        if parallel.grad_compression != "none":
            yield exclusive(name, f"grad_compression={parallel.grad_compression}, whose errors belong to a rank")
        if training.global_batch_size is None and config.optional("rampup_batch_size") is None:
            yield f"{name} needs global_batch_size, which otherwise changes with the number of ranks; add it"
    faults = config.section(FaultConfig).faults
    if len(faults) > MOST_FAULTS:
        yield f"inject_fault has {len(faults)} faults; with {name} give at most {MOST_FAULTS}"


def fault_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Unknown faults, and faults of the disk in the background."""
    settings = config.section(FaultConfig)
    for text in settings.inject_fault:
        if Fault.of(text) is None:
            yield (
                f"inject_fault={text[:100]} is not a fault; use KIND@RANK:STEP; kinds: "
                f"{', '.join((*FAULTS_OF_RANKS, *FAULTS_ON_DISK))}, or an axis ({', '.join(LINK_AXES)}) and damage "
                f"({', '.join((*LINK_DAMAGES, *LINK_DELAYS))}) such as tp-zeros"
            )
    on_disk = [fault.name for fault in settings.faults if fault.name in FAULTS_ON_DISK]
    if on_disk and config.optional("async_save"):
        yield exclusive(f"inject_fault={on_disk[0]}", "async_save=True")
