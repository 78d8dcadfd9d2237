"""The error of checkpoints, and a test for checkpoints."""

from pathlib import Path

from megatron_core.checkpoint import find_checkpoint
from megatron_core.errors import CheckpointError

CheckpointingException = CheckpointError


def check_is_distributed_checkpoint(checkpoint_dir: str | Path) -> bool:
    """Whether the folder has a complete checkpoint of this package."""
    return find_checkpoint(str(checkpoint_dir)) is not None
