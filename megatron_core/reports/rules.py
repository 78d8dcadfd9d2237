"""Rules for profiles and records of hashes."""

from collections.abc import Iterator

from megatron_core.config.run import RunConfig
from megatron_core.reports.settings import HashConfig, ProfileConfig


def hash_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Records of hashes without a file."""
    has_file = config.monitor.metrics_file or config.checkpoint.save
    if config.section(HashConfig).record_hashes and not has_file:
        yield "record_hashes=True has no file to write to; give --metrics-file FILE or --save FOLDER"


def profile_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """A profile without steps or of ranks that do not exist."""
    settings = config.section(ProfileConfig)
    if not settings.profile:
        return
    start, end = settings.profile_step_start, settings.profile_step_end
    if not 0 <= start < end:
        yield (
            f"profile_step_start={start} and profile_step_end={end} leave no step to trace; give a start >= 0 and an "
            "end after it"
        )
    outside = [rank for rank in settings.profile_ranks if not 0 <= rank < world_size]
    if outside:
        yield f"profile_ranks={outside} do not exist; legal: 0 to {world_size - 1}"
