"""Files of weights for programs that read them with ``torch.load`` or safetensors."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from megatron_core.hub.deepspeed.shards import memory_key
from megatron_core.output_file import new_file


def write_weights(state: Mapping[str, Tensor], path: Path) -> None:
    """Write copies of the tensors as ``*.safetensors``, else for ``torch.load(weights_only=True)``.

    Copies, because a view would be written together with its whole buffer; tied weights are written once by torch.
    The file appears when it is complete: programs let every rank convert a checkpoint, and read the file at once.
    """
    with new_file(path) as file:
        if path.suffix == ".safetensors":
            copied = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in state.items()}
            save_file(copied, file.name, metadata={"format": "pt"})  # transformers needs the entry
            return
        copies: dict[tuple[Any, ...], Tensor] = {}
        for tensor in state.values():
            copies.setdefault(memory_key(tensor), tensor.detach().cpu().clone())
        torch.save({name: copies[memory_key(tensor)] for name, tensor in state.items()}, file)
