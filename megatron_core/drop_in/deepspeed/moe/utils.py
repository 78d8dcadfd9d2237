"""Whether parameters belong to experts: none of a model of your own does here."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Return (False, 0): a layer ``MoE`` cannot be constructed."""
    return False, 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether a parameter belongs to an expert."""
    return not getattr(param, "allreduce", True)


def is_moe_param_group(param_group: dict[str, Any]) -> bool:
    """Whether a group of an optimizer has the parameters of experts."""
    return bool(param_group.get("moe", False))


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: dict[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """Return the groups as a list: without experts there is nothing to split."""
    return [param_groups] if isinstance(param_groups, dict) else list(param_groups)


def configure_moe_param_groups(model_parameters: list[Any]) -> list[Any]:
    """Return the parameters or groups as they are: without experts there is nothing to split."""
    return model_parameters
