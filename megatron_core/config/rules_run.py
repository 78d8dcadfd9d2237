"""Rules for checkpoints and bad steps."""

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


def bad_step_problems(config: RunConfig) -> Iterator[str]:
    """Bad steps that are skipped must be noticed."""
    steps = config.resilience.max_bad_steps
    if steps and not config.training.check_for_nan_in_loss_and_grad:
        yield exclusive(f"max_bad_steps={steps}", "check_for_nan_in_loss_and_grad=False")
