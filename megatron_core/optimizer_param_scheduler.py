"""For Megatron Core's users: learning rate and weight decay of an optimizer's parameter groups over time."""

from megatron_core.optimizer.config_overrides import (
    ParamGroupOverride as ParamGroupOverride,
)
from megatron_core.optimizer.config_overrides import (
    combine_param_group_overrides as combine_param_group_overrides,
)
from megatron_core.optimizer.param_scheduler import (
    OptimizerParamScheduler as OptimizerParamScheduler,
)
from megatron_core.optimizer.param_scheduler import (
    get_canonical_lr_for_logging as get_canonical_lr_for_logging,
)
from megatron_core.optimizer.param_scheduler import (
    param_group_override_to_tuple as param_group_override_to_tuple,
)
