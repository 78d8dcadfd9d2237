"""Rules for checkpoints, profiles, injected faults and elastic runs."""

import os.path
from collections.abc import Iterator

from megatron_core.config.checkpoint import CheckpointConfig
from megatron_core.config.compression import compression_of
from megatron_core.config.resilience import (
    FAULTS_OF_RANKS,
    FAULTS_ON_DISK,
    LINK_AXES,
    LINK_DAMAGES,
    LINK_DELAYS,
    MOST_FAULTS,
    Fault,
)
from megatron_core.config.rules_single import exclusive, shown
from megatron_core.config.run import RunConfig


def checkpoint_problems(config: RunConfig) -> Iterator[str]:
    """Contradictory folders of checkpoints, and unknown names of model settings."""
    checkpoint = config.checkpoint
    yield from _fast_restart_problems(checkpoint)
    unknown = tuple(name for name in checkpoint.changed_model_settings if not hasattr(config.model, name))
    if unknown:
        yield (f"changed_model_settings={shown(unknown)} names no setting of the model; give names such as rotary_base")


def _fast_restart_problems(checkpoint: CheckpointConfig) -> Iterator[str]:
    kind, folder = checkpoint.non_persistent_ckpt_type, checkpoint.non_persistent_local_ckpt_dir
    own = folder if kind == "local" else checkpoint.non_persistent_global_ckpt_dir
    if own and checkpoint.save and os.path.normpath(own) == os.path.normpath(checkpoint.save):
        yield (
            f"non_persistent_{kind}_ckpt_dir={own} is the folder of --save, where a checkpoint for a fast restart "
            "would replace the permanent ones; give another folder"
        )
    if kind == "local" and folder is None:
        yield (
            "non_persistent_ckpt_type=local needs a folder in the memory of each host; give "
            "--non-persistent-local-ckpt-dir /dev/shm/NAME"
        )


def monitor_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Records of hashes without a file, and a profile without steps or of ranks that do not exist."""
    monitor = config.monitor
    if monitor.record_hashes and not (monitor.metrics_file or config.checkpoint.save):
        yield "record_hashes=True has no file to write to; give --metrics-file FILE or --save FOLDER"
    if not monitor.profile:
        return
    start, end = monitor.profile_step_start, monitor.profile_step_end
    if not 0 <= start < end:
        yield (
            f"profile_step_start={start} and profile_step_end={end} leave no step to trace; give a start >= 0 and an "
            "end after it"
        )
    outside = [rank for rank in monitor.profile_ranks if not 0 <= rank < world_size]
    if outside:
        yield f"profile_ranks={outside} do not exist; legal: 0 to {world_size - 1}"


def resilience_problems(config: RunConfig) -> Iterator[str]:
    """Unknown faults, and contradictory settings of faults, bad steps and elastic runs."""
    resilience = config.resilience
    for text in resilience.inject_fault:
        if Fault.of(text) is None:
            yield (
                f"inject_fault={text[:100]} is not a fault; use KIND@RANK:STEP; kinds: "
                f"{', '.join((*FAULTS_OF_RANKS, *FAULTS_ON_DISK))}, or an axis ({', '.join(LINK_AXES)}) and damage "
                f"({', '.join((*LINK_DAMAGES, *LINK_DELAYS))}) such as tp-zeros"
            )
    on_disk = [fault.kind for fault in resilience.faults if fault.kind in FAULTS_ON_DISK]
    if on_disk and config.checkpoint.async_save:
        yield exclusive(f"inject_fault={on_disk[0]}", "async_save=True")
    if resilience.recover != "none":
        yield from _recovery_problems(config)
    if resilience.elastic:
        yield from _elastic_problems(config)
    if resilience.max_bad_steps and not config.training.check_for_nan_in_loss_and_grad:
        yield exclusive(f"max_bad_steps={resilience.max_bad_steps}", "check_for_nan_in_loss_and_grad=False")


def _recovery_problems(config: RunConfig) -> Iterator[str]:
    """Settings whose state or processes a recovery in the same processes does not cover."""
    name = f"recover={config.resilience.recover}"
    if config.resilience.elastic:
        yield exclusive(name, "elastic=True")
    parallel, training = config.parallel, config.training
    compression = compression_of(parallel)
    if compression is not None and compression.is_local:
        yield exclusive(name, f"grad_compression={compression.name}, whose ranks differ between synchronizations")
    if config.resilience.recover_without_spare:
        name = "recover_without_spare=True"
        if parallel.grad_compression != "none":
            yield exclusive(name, f"grad_compression={parallel.grad_compression}, whose errors belong to a rank")
        if training.global_batch_size is None and training.rampup_batch_size is None:
            yield f"{name} needs global_batch_size, which otherwise changes with the number of ranks; add it"
    if config.resilience.faults and len(config.resilience.faults) > MOST_FAULTS:
        yield f"inject_fault has {len(config.resilience.faults)} faults; with {name} give at most {MOST_FAULTS}"


def _elastic_problems(config: RunConfig) -> Iterator[str]:
    """Settings that a run needs, or cannot have, if the number of its ranks changes."""
    save, load = config.checkpoint.save, config.checkpoint.load
    if save is None or load != save:
        yield (
            f"elastic=True resumes from the run's own checkpoints, but save={str(save)[:200]} and "
            f"load={str(load)[:200]}; give both the same folder"
        )
    if config.training.global_batch_size is None and config.training.rampup_batch_size is None:
        yield (
            "elastic=True needs global_batch_size, which otherwise changes with the number of ranks; add "
            "--global-batch-size"
        )
    if config.training.skip_train:
        yield "elastic=True has no effect with skip_train=True; remove one of them"
