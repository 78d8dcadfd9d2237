"""Which runs have low-rank adapters; ``config.rules_tuning`` has the rules of their settings."""

from megatron_core.config.run import RunConfig


def has_adapters(config: RunConfig) -> bool:
    """Whether linear layers have adapters."""
    return config.tuning.lora_rank is not None
