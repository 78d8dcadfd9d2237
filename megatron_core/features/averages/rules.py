"""Rules of averaged weights."""

from collections.abc import Iterator

from megatron_core.config.parallel import compression_of
from megatron_core.config.run import RunConfig


def average_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Settings with which there is no average of the weights."""
    if config.optimizer.ema_decay is None:
        return
    compression = compression_of(config.parallel)
    if compression is not None and compression.updates_outside_of_steps:
        yield (
            f"grad_compression={compression.name} cannot be used with "
            f"ema_decay={config.optimizer.ema_decay:g}: weights change between updates; remove one of them"
        )
    for name in ("optimizer_offload_dir", "zero3_param_offload_dir"):
        if (value := config.flat()[name]) is not None:
            yield (
                f"{name}={value} cannot be used with ema_decay={config.optimizer.ema_decay:g}, whose average is "
                "updated in memory; remove one of them"
            )
