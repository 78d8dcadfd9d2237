"""The settings of ``DistributedDataParallel``."""

from dataclasses import dataclass

from megatron_core.config.refused import refuse_changes, refused
from megatron_core.errors import ConfigError


@dataclass
class DistributedDataParallelConfig:
    """Megatron Core's fields and defaults.

    Without effect: gradients of 16-bit weights are always accumulated and summed in float32 (``grad_reduce_in_fp32``,
    ``param_name_patterns_for_fp32_local_accumulation``), without sharding nothing is gathered
    (``overlap_param_gather``), a gradient that
    is not finite shows in the optimizer's norm (``check_for_nan_in_grad``), and how buckets are laid out and divided.
    """

    grad_reduce_in_fp32: bool = False
    overlap_grad_reduce: bool = False
    overlap_param_gather: bool = False
    align_param_gather: bool = False
    use_distributed_optimizer: bool = False
    num_distributed_optimizer_instances: int = 1
    check_for_nan_in_grad: bool = False
    check_for_large_grads: bool = False
    param_name_patterns_for_fp32_local_accumulation: tuple[str, ...] = ()
    bucket_size: int | None = None
    """Elements; by default max(40,000,000, 1,000,000 x data-parallel size)."""
    num_buckets: int | None = None
    pad_buckets_for_high_nccl_busbw: bool = False
    reduce_scatter_with_fp32_accumulation: bool = False
    average_in_collective: bool = False
    gradient_reduce_div_fusion: bool = True
    fp8_param_gather: bool = refused(False)
    fp4_param_gather: bool = refused(False)
    use_megatron_fsdp: bool = refused(False)
    use_custom_fsdp: bool = refused(False)
    data_parallel_sharding_strategy: str = "no_shard"
    """no_shard, optim, optim_grads, optim_grads_params: ZeRO stages 0 to 3."""
    outer_dp_sharding_strategy: str = refused("no_shard")
    nccl_ub: bool = refused(False)
    fsdp_double_buffer: bool = refused(False)
    delay_wgrad_compute: bool = refused(False)

    def __post_init__(self) -> None:
        """Refuse what is not supported."""
        refuse_changes(self)
        if self.data_parallel_sharding_strategy not in _STAGES:
            raise ConfigError(
                f"data_parallel_sharding_strategy={self.data_parallel_sharding_strategy!r} is none of "
                f"{', '.join(_STAGES)}"
            )
        if self.grad_reduce_in_fp32 and self.param_name_patterns_for_fp32_local_accumulation:
            raise ConfigError(
                "param_name_patterns_for_fp32_local_accumulation is for gradients that are not reduced in float32; "
                "leave out one of the two"
            )

    @property
    def zero_stage(self) -> int:
        """What is sharded over data-parallel ranks: 0 nothing, 1 optimizer state, 2 gradients too, 3 weights too."""
        return max(_STAGES.index(self.data_parallel_sharding_strategy), int(self.use_distributed_optimizer))


_STAGES = ("no_shard", "optim", "optim_grads", "optim_grads_params")
