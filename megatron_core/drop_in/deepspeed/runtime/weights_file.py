"""Files of weights for programs that read them with ``torch.load`` or safetensors."""

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor


def write_weights(state: Mapping[str, Tensor], path: Path) -> None:
    """Write copies of the tensors as ``*.safetensors``, else for ``torch.load(weights_only=True)``.

    Copies, because a view would be written together with its whole buffer; tied weights are written once by torch.
    """
    if path.suffix == ".safetensors":
        save_file({name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}, path)
        return
    copies: dict[tuple[int, torch.Size], Tensor] = {}
    for tensor in state.values():
        copies.setdefault((tensor.data_ptr(), tensor.shape), tensor.detach().cpu().clone())
    torch.save({name: copies[tensor.data_ptr(), tensor.shape] for name, tensor in state.items()}, path)
