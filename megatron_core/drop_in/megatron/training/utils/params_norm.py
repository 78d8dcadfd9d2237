"""The norm of a model's weights."""

import math
from typing import Any

import torch
from torch import nn

from megatron.core.tensor_parallel.layers import param_is_not_tensor_parallel_duplicate
from megatron_core import parallel_state
from megatron_core.parallel import World
from megatron_core.parallel.collectives import all_reduce_


def calc_params_l2_norm(model: nn.Module | list[Any], force_create_fp32_copy: bool = False) -> float:
    """Return the square root of the sum of squares of all weights, each counted once over the model-parallel ranks.

    Sums are in float64. Weights that tensor-parallel ranks or tied stages hold as copies are counted on the first.
    ``force_create_fp32_copy`` has no effect.
    """
    tp, expert_tp = parallel_state.get_tensor_model_parallel_group(), parallel_state.get_expert_tensor_parallel_group()
    groups = parallel_state.get_model_parallel_group(), parallel_state.get_expert_tensor_model_pipeline_parallel_group()
    sums = torch.zeros(2, dtype=torch.float64, device=World.from_environment().device)
    for parameter in (each for chunk in (model if isinstance(model, list) else [model]) for each in chunk.parameters()):
        first = param_is_not_tensor_parallel_duplicate(parameter, tp, expert_tp)
        if first and not getattr(parameter, "shared", False):
            is_expert = int(not getattr(parameter, "allreduce", True))
            sums[is_expert] += parameter.detach().to(sums).square().sum()
    for index, group in enumerate(groups):
        assert group is not None, "the getters above raise without groups"
        all_reduce_(sums[index : index + 1], group)
    return math.sqrt(sums.sum().item())
