"""Hashes of weights on data-parallel ranks."""

import hashlib
from typing import Any

import torch
from torch import nn

from megatron_core import parallel_state
from megatron_core.parallel.collectives import all_gather_flat_


def check_param_hashes_across_dp_replicas(model: list[nn.Module], cross_check: bool = False) -> bool:
    """Whether this rank's weights equal those of the first data-parallel rank; with ``cross_check`` of all ranks."""
    named = [parameter for chunk in model for parameter in chunk.parameters()]
    kinds = {True: parallel_state.get_data_parallel_group, False: parallel_state.get_expert_data_parallel_group}
    same = True
    for dense, group in kinds.items():
        own = [_digest(parameter) for parameter in named if getattr(parameter, "allreduce", True) is dense]
        if own:
            found = _gathered(torch.stack(own), group())
            same &= bool((found == found[:1]).all() if cross_check else (found[0] == torch.stack(own)).all())
    return same


def _digest(parameter: Any) -> torch.Tensor:
    """SHA-1 of the values in float32, 20 bytes."""
    values = parameter.detach().float().cpu().contiguous().numpy().tobytes()
    return torch.tensor(list(hashlib.sha1(values, usedforsecurity=False).digest()), dtype=torch.uint8)


def _gathered(own: torch.Tensor, group: Any) -> torch.Tensor:
    """Return the tensors of all ranks of a group, stacked."""
    if group.size() == 1:
        return own[None]
    found = own.new_empty(group.size() * own.numel())
    all_gather_flat_(found, own.reshape(-1), group)
    return found.view(group.size(), *own.shape)
