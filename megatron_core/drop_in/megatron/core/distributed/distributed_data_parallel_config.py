"""The settings of ``DistributedDataParallel``."""

from dataclasses import dataclass

from megatron.core.mirror import mirror, refuse_changes
from megatron_core.errors import ConfigError


@dataclass
class DistributedDataParallelConfig(mirror("DistributedDataParallelConfig")):  # type: ignore[misc]
    """Megatron Core's fields and defaults.

    ``bucket_size`` is a number of elements, by default max(40,000,000, 1,000,000 x data-parallel size).
    ``data_parallel_sharding_strategy``: no_shard, optim, optim_grads and optim_grads_params are ZeRO stages 0 to 3.
    No effect: gradients of 16-bit weights are always accumulated and summed in float32 (``grad_reduce_in_fp32``), and
    the optimizer's norm shows gradients that are not finite (``check_for_nan_in_grad``).
    """

    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Check conflicting and unsupported settings."""
        refuse_changes(self)
        if self.data_parallel_sharding_strategy not in _STAGES:
            raise ConfigError(
                f"data_parallel_sharding_strategy={self.data_parallel_sharding_strategy!r} is none of "
                f"{', '.join(_STAGES)}"
            )
        if self.grad_reduce_in_fp32 and self.param_name_patterns_for_fp32_local_accumulation:
            raise ConfigError(
                "param_name_patterns_for_fp32_local_accumulation needs grad_reduce_in_fp32=False; leave one of them out"
            )

    @property
    def zero_stage(self) -> int:
        """The ZeRO stage: 1 shards the optimizer state, 2 also gradients, 3 also weights."""
        return max(_STAGES.index(self.data_parallel_sharding_strategy), int(self.use_distributed_optimizer))


_STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
