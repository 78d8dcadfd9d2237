"""Files of ``torch.save`` with the interface of safetensors' ``safe_open``; no code that they name is run."""

from __future__ import annotations

import re
from pathlib import Path

import torch
from torch import Tensor

from megatron_core.checkpoint.manifest import TORCH_DTYPES
from megatron_core.errors import CheckpointError
from megatron_core.hub.megatron_lm.pickles import load_tensors

NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
NOTHING = re.compile("(?!)")
"""No Python object may be named."""


class PickledFile:
    """The tensors of a file of ``torch.save`` by name, memory-mapped unless the file has the format before torch 1.6.

    Errors: ``CheckpointError`` for a file that is damaged, names Python objects, or holds anything but tensors by name.
    """

    def __init__(self, path: Path) -> None:
        found = load_tensors(path, NOTHING)
        if not isinstance(found, dict) or not all(isinstance(each, Tensor) for each in found.values()):
            raise CheckpointError(f"{path} must contain tensors by name; save the state_dict of the model alone")
        self._tensors: dict[str, Tensor] = found

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> PickledSlice:
        """A tensor whose parts can be read."""
        return PickledSlice(self._tensors[name])


class PickledSlice:
    """A stored tensor: shape, dtype and parts."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor.detach()

    def get_shape(self) -> list[int]:
        """The sizes of the tensor."""
        return list(self._tensor.shape)

    def get_dtype(self) -> str:
        """The name of the dtype in safetensors' format, else in torch."""
        return NAMES.get(self._tensor.dtype, str(self._tensor.dtype))

    def __getitem__(self, index: tuple[slice, ...]) -> Tensor:
        return torch.clone(self._tensor[index])
