"""The parameters that Muon does not update."""

from torch import nn

from megatron.core.optimizer.config_overrides import is_managed_by_layer_wise_optimizer


def _is_muon_excluded(param: nn.Parameter) -> bool:
    return not is_managed_by_layer_wise_optimizer(param)
