"""Faults injected with nvidia-resiliency-ext, which is not supported."""

from dataclasses import dataclass

from megatron.core.unsupported import unsupported

_MESSAGE = "faults injected with nvidia-resiliency-ext are not supported; use --inject-fault"


@dataclass(kw_only=True)
class FaultInjectorConfig:
    """Settings of injected faults; ``setup_fault_injection`` raises ConfigError."""

    fault_injector_ranks: str | None = None
    fault_injector_num_ranks: int | None = None
    fault_injector_fault_types: str | None = None
    fault_injector_fault_probabilities: str | None = None
    fault_injector_fault_delay: float | None = None
    fault_injector_delay_start_iteration: int | None = None
    fault_injector_mtti_seconds: float | None = None
    fault_injector_offset_seconds: float | None = None
    fault_injector_seed: int | None = None


setup_fault_injection = maybe_raise_workload_exception = unsupported(_MESSAGE)
