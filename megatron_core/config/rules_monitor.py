"""Rules for records, timers and profiles."""

from collections.abc import Iterator

from megatron_core.config.run import RunConfig


def monitor_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Check that what reads the times of steps has them, and that a profile has steps and ranks."""
    monitor = config.monitor
    for name in ("profile", "log_straggler", "timing_log_level"):
        value = getattr(monitor, name)
        if value and not monitor.record_times:
            yield f"{name}={value} reads the times of steps, and record_times=False; remove --no-record-times"
    if not monitor.profile:
        return
    start, end = monitor.profile_step_start, monitor.profile_step_end
    if not 0 <= start < end:
        yield (
            f"profile_step_start={start} and profile_step_end={end} leave no step to trace; legal: 0 or more, and more "
            "than the start"
        )
    outside = [rank for rank in monitor.profile_ranks if not 0 <= rank < world_size]
    if outside:
        yield f"profile_ranks={outside} do not exist; legal: 0 to {world_size - 1}"
