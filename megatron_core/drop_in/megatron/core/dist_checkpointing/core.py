"""The error of checkpoints, and a test for checkpoints."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_core.checkpoint import find_checkpoint
from megatron_core.errors import CheckpointError

CheckpointingException = CheckpointError


def check_is_distributed_checkpoint(checkpoint_dir: str | Path) -> bool:
    """Whether the folder has a complete checkpoint of this package."""
    return find_checkpoint(str(checkpoint_dir)) is not None


CONFIG_FNAME = "metadata.json"


@dataclass
class CheckpointingConfig:
    """The format of a checkpoint, as Megatron Core stores it in ``metadata.json``."""

    sharded_backend: str
    sharded_backend_version: int = 1
    common_backend: str = "torch"
    common_backend_version: int = 1


def maybe_load_config(checkpoint_dir: str | Path) -> CheckpointingConfig | None:
    """Return the format of a checkpoint of Megatron Core; None without ``metadata.json``."""
    path = Path(checkpoint_dir) / CONFIG_FNAME
    return CheckpointingConfig(**json.loads(path.read_text())) if path.is_file() else None


def save_config(config: CheckpointingConfig, checkpoint_dir: str | Path) -> None:
    """Write ``metadata.json``."""
    (Path(checkpoint_dir) / CONFIG_FNAME).write_text(json.dumps(asdict(config)))
