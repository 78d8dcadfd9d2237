"""Reads tensors of a safetensors file in object storage: the header once, then only the needed rows of a tensor."""

import math
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from megatron_core.checkpoint.manifest import TORCH_DTYPES
from megatron_core.checkpoint.one_pass import read_tensor_header
from megatron_core.locations import ObjectPath


class TensorsInStorage:
    """The interface of ``safetensors.safe_open`` for an object. Errors: ``OSError``, ``ValueError`` for a damaged
    header."""

    def __init__(self, path: ObjectPath) -> None:
        self.path = path
        self._begin, self._header = read_tensor_header(cast(Path, path))

    def metadata(self) -> dict[str, str] | None:
        """The texts stored with the tensors."""
        return self._header.get("__metadata__")

    def get_slice(self, key: str) -> "SliceInStorage":
        """A tensor that is read when it is indexed."""
        return SliceInStorage(self.path, self._begin, self._header[key])


class SliceInStorage:
    """A tensor of the file."""

    def __init__(self, path: ObjectPath, begin: int, entry: dict[str, Any]) -> None:
        self._path, self._shape, self._dtype = path, tuple(entry["shape"]), entry["dtype"]
        self._begin = begin + entry["data_offsets"][0]

    def get_shape(self) -> list[int]:
        """The shape."""
        return list(self._shape)

    def get_dtype(self) -> str:
        """The dtype's name in the format."""
        return self._dtype

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        """Part of the tensor: one slice with step 1 for each dimension. Complete rows are read in one request."""
        dtype, rows = TORCH_DTYPES[self._dtype], self._shape[:1] or (1,)
        first, stop, _ = where[0].indices(rows[0]) if where else (0, 1, 1)
        row = dtype.itemsize * math.prod(self._shape[1:])
        size, within_row = (stop - first) * row, (slice(None), *where[1:])
        if not size:
            return torch.empty((stop - first, *self._shape[1:]), dtype=dtype)[within_row]
        # Complete rows, although a part of each may suffice: a request takes longer than the bytes between the parts.
        data = bytearray(self._path.read_range(self._begin + first * row, size))
        if len(data) != size:
            raise OSError(f"{self._path} is truncated")
        tensor = torch.frombuffer(data, dtype=torch.uint8).view(dtype)
        if not where:
            return tensor.view(())
        return tensor.view(stop - first, *self._shape[1:])[within_row]
