"""Settings of the faults that Megatron injects with nvidia-resiliency-ext; the injection is not supported."""

from megatron.core.mirror import mirror


class FaultInjectorConfig(mirror("FaultInjectorConfig", kw_only=True)):  # type: ignore[misc]
    """Settings of injected faults; the functions of this module raise ConfigError."""
