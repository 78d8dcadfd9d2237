"""Rules for checkpoints and bad steps."""

import os.path
from collections.abc import Iterator

from megatron_core.config.checkpoint import CheckpointConfig
from megatron_core.config.rules_single import exclusive, shown
from megatron_core.config.run import RunConfig


def checkpoint_problems(config: RunConfig) -> Iterator[str]:
    """Contradictory folders of checkpoints, and unknown names of model settings."""
    checkpoint = config.checkpoint
    if checkpoint.non_persistent_ckpt_type == "global":
        yield from fast_restart_problems(checkpoint, "non_persistent_global_ckpt_dir")
    unknown = tuple(name for name in checkpoint.changed_model_settings if not hasattr(config.model, name))
    if unknown:
        yield (f"changed_model_settings={shown(unknown)} names no setting of the model; give names such as rotary_base")


def fast_restart_problems(checkpoint: CheckpointConfig, setting: str) -> Iterator[str]:
    """A folder of checkpoints for a fast restart, the value of ``setting``, that is the folder of --save."""
    folder = getattr(checkpoint, setting)
    if folder and checkpoint.save and os.path.normpath(folder) == os.path.normpath(checkpoint.save):
        yield (
            f"{setting}={folder} is the folder of --save, where a checkpoint for a fast restart would replace the "
            "permanent ones; give another folder"
        )


def bad_step_problems(config: RunConfig) -> Iterator[str]:
    """Bad steps that are skipped must be noticed."""
    steps = config.resilience.max_bad_steps
    if steps and not config.training.check_for_nan_in_loss_and_grad:
        yield exclusive(f"max_bad_steps={steps}", "check_for_nan_in_loss_and_grad=False")
