"""Copies of tensors for saving."""

from typing import Any

import torch


def clone_tensors_for_torch_save(item: Any, device: torch.device | str = "cpu") -> Any:
    """Return ``item`` with copies of its tensors on ``device``, inside of lists, tuples and dicts too.

    A view would be written together with its whole buffer.
    """
    if isinstance(item, torch.Tensor):
        return item.detach().clone() if str(item.device) == str(device) else item.detach().to(device)
    if isinstance(item, list | tuple):
        return type(item)(clone_tensors_for_torch_save(each, device) for each in item)
    if isinstance(item, dict):
        return type(item)({name: clone_tensors_for_torch_save(each, device) for name, each in item.items()})
    return item
