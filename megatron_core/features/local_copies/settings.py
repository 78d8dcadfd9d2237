"""Settings of checkpoints in the memory of hosts, and their rules."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from megatron_core.config import ranges as r
from megatron_core.config.checkpoint import CheckpointConfig
from megatron_core.config.rules_data import fast_restart_problems
from megatron_core.config.run import RunConfig
from megatron_core.config.setting import Condition, given, section, setting

LOCAL_FAST_RESTART = Condition(
    "--non-persistent-ckpt-type local", lambda run: run.checkpoint.non_persistent_ckpt_type == "local"
)
REPLICATION = given("replication")


@dataclass(frozen=True, kw_only=True)
@section()
class LocalCopiesConfig(CheckpointConfig):
    """Checkpoints in the memory of hosts: folder and copies."""

    non_persistent_local_ckpt_dir: str | None = setting(None, r.FOLDER, needs=LOCAL_FAST_RESTART)
    """Folder in the memory of each host for checkpoints for a fast restart, such as /dev/shm/NAME. It must not contain
    other checkpoints or belong to another user; a new folder has mode 700."""
    replication: bool = setting(False, needs=LOCAL_FAST_RESTART)
    """With --non-persistent-ckpt-type local: store copies on other hosts, so that the loss of a host loses no steps."""
    replication_jump: int | None = setting(None, r.COUNT, needs=REPLICATION)
    """Distance in ranks between a rank and the ranks that store its copies; default: the number of ranks of a host."""
    replication_factor: int = setting(2, r.integers(2), needs=REPLICATION)
    """Number of hosts that store each rank's part of a checkpoint, including its own host."""

    @property
    def local_folder(self) -> Path:
        """Folder in this host's memory."""
        return Path(self.non_persistent_local_ckpt_dir or ".")


def copies_locally(config: RunConfig) -> bool:
    """Whether checkpoints for a fast restart are in the memory of each host."""
    return config.checkpoint.non_persistent_ckpt_type == "local"


def local_copy_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """A missing folder, or the folder of --save."""
    settings = config.section(LocalCopiesConfig)
    if not copies_locally(config):
        return
    yield from fast_restart_problems(settings, "non_persistent_local_ckpt_dir")
    if settings.non_persistent_local_ckpt_dir is None:
        yield (
            "non_persistent_ckpt_type=local needs a folder in the memory of each host; give "
            "--non-persistent-local-ckpt-dir /dev/shm/NAME"
        )
