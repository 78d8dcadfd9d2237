"""Schedules of learning rate and weight decay of an optimizer's parameter groups."""

from megatron.core.optimizer.config_overrides import (
    ParamGroupOverride,
    combine_param_group_overrides,
)
from megatron.core.optimizer.param_scheduler import (
    OptimizerParamScheduler,
    get_canonical_lr_for_logging,
    param_group_override_to_tuple,
)
