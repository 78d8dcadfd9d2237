"""Rules for checkpoints in the memory of hosts."""

from collections.abc import Iterator

from megatron_core.config.rules_data import fast_restart_problems
from megatron_core.config.run import RunConfig
from megatron_core.features.local_copies.settings import LocalCopiesConfig


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
