"""Names of DeepSpeed's files, and copies of tensors for saving."""

import os
from typing import Any

import torch

LATEST_UNIVERSAL = "latest_universal"
"""File with the tag of the newest checkpoint that ds_to_universal wrote."""


def get_model_ckpt_name_for_rank(base_folder: str, mp_rank_str: str) -> str:
    """Return the path of the module's file of a model-parallel rank, such as ``00``."""
    return os.path.join(base_folder, f"mp_rank_{mp_rank_str}_model_states.pt")


def get_zero_ckpt_name_for_rank(base_folder: str, dp_rank: int, mp_rank: int) -> str:
    """Return the path of the optimizer's file of a rank."""
    return os.path.join(base_folder, f"zero_pp_rank_{dp_rank}_mp_rank_{mp_rank:02d}_optim_states.pt")


def get_layer_ckpt_name_for_rank(base_folder: str, layer_id: str, tp_rank: int) -> str:
    """Return the path of a pipeline's layer, such as ``layer_00``."""
    return os.path.join(base_folder, f"{layer_id}-model_{tp_rank:02d}_model_states.pt")


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
