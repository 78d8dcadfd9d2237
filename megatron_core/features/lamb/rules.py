"""Rules of LAMB."""

from collections.abc import Iterator

from megatron_core.config import RunConfig
from megatron_core.features.lamb.settings import LAMBConfig


def uses_lamb(config: RunConfig) -> bool:
    """Whether the run has this optimizer."""
    return config.optimizer.optimizer == "lamb"


def lamb_problems(config: RunConfig, world_size: int) -> Iterator[str]:
    """Limits in the wrong order, and state that LAMB cannot have."""
    if not uses_lamb(config):
        return
    settings = config.section(LAMBConfig)
    if settings.lamb_min_coeff > settings.lamb_max_coeff:
        yield (
            f"lamb_min_coeff={settings.lamb_min_coeff} is above lamb_max_coeff={settings.lamb_max_coeff}; use a "
            "smaller --lamb-min-coeff"
        )
    if settings.offloads_optimizer or settings.bf16_settings:
        yield (
            "optimizer=lamb needs norms of whole tensors before it updates a weight, so its main weights must be in "
            "float32 on the device; remove --optimizer-cpu-offload, --optimizer-offload-dir and "
            "--main-params-dtype bf16"
        )
