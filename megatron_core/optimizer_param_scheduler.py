"""For Megatron Core's users: learning rate and weight decay of an optimizer's parameter groups over time."""

from megatron_core.optimizer.config_overrides import ParamGroupOverride, combine_param_group_overrides
from megatron_core.optimizer.param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
    param_group_override_to_tuple,
)

__all__ = [
    "OptimizerParamScheduler",
    "ParamGroupOverride",
    "combine_param_group_overrides",
    "get_canonical_lr_for_logging",
    "param_group_override_to_tuple",
]
