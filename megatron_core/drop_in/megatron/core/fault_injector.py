"""The plan of faults that Megatron injects with nvidia-resiliency-ext; the injection itself is not supported."""

import math
import random
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from megatron_core.drop_in.unsupported import unsupported
from megatron_core.errors import ConfigError

has_nvidia_resiliency_ext = False
rng: Any = None
"""The random numbers of the plan; ``random.Random(fault_injector_seed)``."""
Fault: Any = None
"""The kinds of faults, of nvidia-resiliency-ext."""


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


def get_fault_ranks(config: FaultInjectorConfig) -> list[int]:
    """Return the listed ranks, or ``fault_injector_num_ranks`` random ones but the first."""
    listed, count, world = config.fault_injector_ranks, config.fault_injector_num_ranks, dist.get_world_size()
    if (listed is None) == (count is None):
        raise ConfigError(f"fault_injector_ranks={listed}, fault_injector_num_ranks={count}: give one of them")
    if listed is None:
        drawn: list[int] = _random().sample(range(1, world), k=count)
        return drawn
    ranks = [int(rank) for rank in listed.split(",")]
    if not all(0 <= rank < world for rank in ranks):
        raise ConfigError(f"fault_injector_ranks={listed} must be between 0 and {world - 1}")
    return ranks


def get_fault(config: FaultInjectorConfig) -> Any:
    """Return a random kind of fault; probabilities are divided by their sum and equal by default."""
    if not has_nvidia_resiliency_ext:
        maybe_raise_workload_exception()
    names, given = config.fault_injector_fault_types, config.fault_injector_fault_probabilities
    if names is None:
        raise ConfigError("fault_injector_fault_types must be specified")
    kinds = [Fault[name.upper()] for name in names.split(",")]
    weights = [1.0] * len(kinds) if given is None else [float(weight) for weight in given.split(",")]
    if len(kinds) != len(weights):
        raise ConfigError(f"fault_injector_fault_probabilities={given} needs one number for each of {names}")
    return _random().choices(kinds, [weight / sum(weights) for weight in weights], k=1)[0]


def get_fault_delay(config: FaultInjectorConfig) -> float:
    """Return the seconds before the fault: given, or offset - mtti log(1 - u) with u uniform in [0, 1)."""
    if config.fault_injector_fault_delay is not None:
        return config.fault_injector_fault_delay
    mean = config.fault_injector_mtti_seconds
    if mean is None:
        raise ConfigError("fault_injector_fault_delay or fault_injector_mtti_seconds must be specified")
    return (config.fault_injector_offset_seconds or 0.0) - mean * math.log(1.0 - _random().random())


def should_setup_fault_injection_at_start(config: FaultInjectorConfig) -> bool:
    """Whether the delay counts from the start of training."""
    return config.fault_injector_delay_start_iteration is None


def should_setup_fault_injection_at_iteration(config: FaultInjectorConfig, iteration: int) -> bool:
    """Whether the delay counts from this iteration."""
    return config.fault_injector_delay_start_iteration == iteration


def _random() -> Any:
    return random.Random() if rng is None else rng


setup_fault_injection = maybe_raise_workload_exception = unsupported(
    "faults injected with nvidia-resiliency-ext are not supported; use --inject-fault"
)
