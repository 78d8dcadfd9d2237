"""The section ``zero_optimization``."""

import sys
from enum import IntEnum
from typing import Any, ClassVar

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig as DeepSpeedZeroOffloadOptimizerConfig,
)
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig as DeepSpeedZeroOffloadParamConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum as OffloadDeviceEnum
from megatron_core.errors import ConfigError


class ZeroStageEnum(IntEnum):
    """Values of ``zero_optimization.stage``."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


GATHER = "gather_16bit_weights_on_model_save"
STAGE_3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    GATHER,
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
"""Attributes whose key begins with ``stage3_``."""


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """The keys of ``zero_optimization`` with DeepSpeed's defaults; docs/deepspeed_keys.md says which have effect."""

    other_names: ClassVar = {
        **{f"stage3_{name}": name for name in STAGE_3},
        "stage3_gather_fp16_weights_on_model_save": GATHER,
    }
    sections: ClassVar = {
        "offload_param": DeepSpeedZeroOffloadParamConfig,
        "offload_optimizer": DeepSpeedZeroOffloadOptimizerConfig,
        "leaf_module": DeepSpeedZeroLeafModuleConfig,
    }

    stage: int = 0
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: int = 500_000_000
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: int = 500_000_000
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    zenflow: Any = None
    sub_group_size: int = 1_000_000_000
    cpu_offload_param: bool | None = None
    cpu_offload_use_pin_memory: bool | None = None
    cpu_offload: bool | None = None
    prefetch_bucket_size: int = 50_000_000
    param_persistence_threshold: int = 100_000
    model_persistence_threshold: int = sys.maxsize
    max_live_parameters: int = 1_000_000_000
    max_reuse_distance: int = 1_000_000_000
    gather_16bit_weights_on_model_save: bool = False
    module_granularity_threshold: int = 0
    use_all_reduce_for_fetch_params: bool = False
    allgather_sequential: bool = False
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: int = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: DeepSpeedZeroLeafModuleConfig
    mics_shard_size: int = -1
    mics_hierarchical_params_gather: bool = False

    def __init__(self, strict: bool = False, **data: Any) -> None:
        self.leaf_module = DeepSpeedZeroLeafModuleConfig()
        super().__init__(strict, **data)
        if self.stage not in range(4):
            raise ConfigError(f"zero_optimization.stage={self.stage!r} must be 0, 1, 2 or 3")
        if self.overlap_comm is None:
            self.overlap_comm = self.stage == ZeroStageEnum.weights
        if self.cpu_offload_param:
            self.offload_param = DeepSpeedZeroOffloadParamConfig(device="cpu")
        if self.cpu_offload:
            self.offload_optimizer = DeepSpeedZeroOffloadOptimizerConfig(device="cpu")
