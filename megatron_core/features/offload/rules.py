"""The description of offloaded state."""

from typing import Any


def describe_offload(config: Any) -> str:
    """Describe the place of optimizer state on disk."""
    optimizer = config.optimizer
    if optimizer.optimizer_offload_dir is None:
        return ""
    return (
        f"optimizer state and main weights: {optimizer.optimizer_offload_fraction:.0%} in unnamed files of "
        f"{optimizer.optimizer_offload_dir}, which are deleted with the process"
    )
