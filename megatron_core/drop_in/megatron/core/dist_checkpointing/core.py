"""The error of checkpoints, and a test for checkpoints."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from megatron_core.checkpoint import find_checkpoint
from megatron_core.errors import CheckpointError
from megatron_core.schema import COUNT, STRING, read_object

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


TYPES = {"sharded_backend": STRING, "common_backend": STRING}
TYPES |= {"sharded_backend_version": COUNT, "common_backend_version": COUNT}


def maybe_load_config(checkpoint_dir: str | Path) -> CheckpointingConfig | None:
    """Return the format of a checkpoint of Megatron Core; None without ``metadata.json``.

    Errors: ``CheckpointError`` for a file without a format, or with values of another type.
    """
    path = Path(checkpoint_dir) / CONFIG_FNAME
    if not path.is_file():
        return None
    content = read_object(path, CheckpointError, "copy the whole checkpoint again", TYPES)
    if content.get("sharded_backend") is None:
        raise CheckpointError(f"{path} has no sharded_backend; copy the whole checkpoint again")
    return CheckpointingConfig(**{name: content[name] for name in TYPES if content.get(name) is not None})


def save_config(config: CheckpointingConfig, checkpoint_dir: str | Path) -> None:
    """Write ``metadata.json``."""
    (Path(checkpoint_dir) / CONFIG_FNAME).write_text(json.dumps(asdict(config)))
