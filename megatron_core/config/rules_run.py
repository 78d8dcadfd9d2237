"""Rules for checkpoints, profiles and bad steps."""

import os.path
from collections.abc import Iterator

from megatron_core.config.checkpoint import CheckpointConfig
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


def bad_step_problems(config: RunConfig) -> Iterator[str]:
    """Bad steps that are skipped must be noticed."""
    steps = config.resilience.max_bad_steps
    if steps and not config.training.check_for_nan_in_loss_and_grad:
        yield exclusive(f"max_bad_steps={steps}", "check_for_nan_in_loss_and_grad=False")
