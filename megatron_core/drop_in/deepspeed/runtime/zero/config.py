"""The section ``zero_optimization``."""

import sys
from collections.abc import Mapping
from enum import IntEnum
from typing import Annotated, Any

from pydantic import ConfigDict, Field, model_validator

from deepspeed.runtime.config_utils import DeepSpeedConfigModel
from deepspeed.runtime.zero.leaf_module_config import DeepSpeedZeroLeafModuleConfig
from deepspeed.runtime.zero.offload_config import (
    DeepSpeedZeroOffloadOptimizerConfig as DeepSpeedZeroOffloadOptimizerConfig,
)
from deepspeed.runtime.zero.offload_config import DeepSpeedZeroOffloadParamConfig as DeepSpeedZeroOffloadParamConfig
from deepspeed.runtime.zero.offload_config import OffloadDeviceEnum as OffloadDeviceEnum
from deepspeed.utils.logging import logger


class ZeroStageEnum(IntEnum):
    """Values of ``zero_optimization.stage``."""

    disabled = 0
    optimizer_states = 1
    gradients = 2
    weights = 3
    max_stage = 3


STAGE_3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
    "gather_16bit_weights_on_model_save",
    "module_granularity_threshold",
    "use_all_reduce_for_fetch_params",
    "allgather_sequential",
)
"""Fields whose key begins with ``stage3_``."""
Count = Annotated[int, Field(ge=0)]


def _replaced_by(new: str, **choices: Any) -> Any:
    """Return the default of a deprecated field, see ``DeepSpeedConfigModel``."""
    return Field(None, json_schema_extra={"deprecated": True, "new_param": new, **choices})


def _on_cpu(kind: type[DeepSpeedConfigModel]) -> Any:
    return lambda is_offloaded: kind(device="cpu") if is_offloaded else None


class DeepSpeedZeroConfig(DeepSpeedConfigModel):
    """The keys of ``zero_optimization`` with DeepSpeed's defaults; docs/deepspeed_keys.md says which have effect."""

    model_config = ConfigDict(alias_generator=lambda name: f"stage3_{name}" if name in STAGE_3 else name)

    stage: ZeroStageEnum = ZeroStageEnum.disabled
    contiguous_gradients: bool = True
    reduce_scatter: bool = True
    reduce_bucket_size: Count = 500_000_000
    use_multi_rank_bucket_allreduce: bool = True
    allgather_partitions: bool = True
    allgather_bucket_size: Count = 500_000_000
    overlap_comm: bool | None = None
    compute_grad_norm: bool = True
    load_from_fp32_weights: bool = True
    elastic_checkpoint: bool = False
    offload_param: DeepSpeedZeroOffloadParamConfig | None = None
    offload_optimizer: DeepSpeedZeroOffloadOptimizerConfig | None = None
    zenflow: Any = None
    sub_group_size: Count = 1_000_000_000
    cpu_offload_param: bool | None = _replaced_by(
        "offload_param", new_param_fn=_on_cpu(DeepSpeedZeroOffloadParamConfig)
    )
    cpu_offload_use_pin_memory: bool | None = _replaced_by("offload_param or offload_optimizer", set_new_param=False)
    cpu_offload: bool | None = _replaced_by(
        "offload_optimizer", new_param_fn=_on_cpu(DeepSpeedZeroOffloadOptimizerConfig)
    )
    prefetch_bucket_size: Count = 50_000_000
    param_persistence_threshold: Count = 100_000
    model_persistence_threshold: Count = sys.maxsize
    max_live_parameters: Count = 1_000_000_000
    max_reuse_distance: Count = 1_000_000_000
    gather_16bit_weights_on_model_save: bool = False
    stage3_gather_fp16_weights_on_model_save: bool | None = _replaced_by("gather_16bit_weights_on_model_save")
    module_granularity_threshold: int = 0
    use_all_reduce_for_fetch_params: bool = False
    allgather_sequential: bool = False
    ignore_unused_parameters: bool = True
    legacy_stage1: bool = False
    round_robin_gradients: bool = False
    parameter_alignment: bool = False
    zero_hpz_partition_size: Count = 1
    zero_quantized_weights: bool = False
    zero_quantized_nontrainable_weights: bool = False
    zero_quantized_gradients: bool = False
    memory_efficient_linear: bool = True
    pipeline_loading_checkpoint: bool = False
    override_module_apply: bool = True
    log_trace_cache_warnings: bool = False
    enable_sanity_checks: bool = False
    save_muon_momentum_buffer_in_memory: bool = False
    leaf_module: DeepSpeedZeroLeafModuleConfig = Field(default_factory=DeepSpeedZeroLeafModuleConfig)
    mics_shard_size: int = -1
    mics_hierarchical_params_gather: bool = False

    @model_validator(mode="after")
    def _complete(self) -> "DeepSpeedZeroConfig":
        if self.overlap_comm is None:
            self.overlap_comm = self.stage == ZeroStageEnum.weights
        if self.stage == ZeroStageEnum.weights and self.elastic_checkpoint:
            logger.warning("elastic checkpointing is deprecated: every checkpoint loads with any number of ranks")
        return self


def get_zero_config(param_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the section ``zero_optimization``, also of its old form true or false."""
    section = param_dict.get("zero_optimization") or {}
    return {"stage": int(section)} if isinstance(section, bool) else dict(section)
