"""The JSON files and the weights of a Hugging Face folder."""

import re
from collections import defaultdict
from collections.abc import Mapping
from contextlib import ExitStack
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from megatron_core.checkpoint.manifest import TORCH_DTYPES, WEIGHT_DTYPES
from megatron_core.errors import CheckpointError, quoted
from megatron_core.foreign_json import OBJECT, KeyType, read_object
from megatron_core.hub.hugging_face.text_part import part_of_multimodal, text_names
from megatron_core.hub.megatron_lm.pickles import load_tensors
from megatron_core.parallel.texts import listed

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
PICKLED = "pytorch_model.bin"
PICKLED_INDEX = "pytorch_model.bin.index.json"
"""Names of earlier releases, for folders without safetensors."""
ROWS_AT_ONCE = 4096
"""Rows of each tensor in memory while two tensors are compared."""


class TensorFiles:
    """The open files of weights of a folder.

    As in ``transformers``, ``model.safetensors`` takes precedence over the files of the index, and these over pickled
    files, which are read without running code. Of a multimodal folder only the text model's tensors are visible, under
    the names that they have without the other parts.
    Errors: ``CheckpointError`` for files that are missing, damaged, or disagree with the index.
    """

    def __init__(self, folder: Path, weights: str = WEIGHTS, *, text_only: bool = False) -> None:
        """``weights``: the name of the file if there is only one; ``text_only``: of a multimodal folder."""
        self.folder = folder
        self.weights = weights
        self.index = INDEX
        has = {name: (folder / name).is_file() for name in (WEIGHTS, INDEX, PICKLED, PICKLED_INDEX)}
        if weights == WEIGHTS and not (has[WEIGHTS] or has[INDEX]) and (has[PICKLED] or has[PICKLED_INDEX]):
            self.weights = PICKLED
            self.index = PICKLED_INDEX
        self._files: dict[Path, safe_open | PickledFile] = {}
        self._open = ExitStack()
        try:
            where = self._find()
        except CheckpointError:
            self.close()
            raise
        self._stored_as = text_names(where) if text_only else {name: name for name in where}
        self._where = {name: where[stored] for name, stored in self._stored_as.items()}
        self._left_out = {stored: where[stored] for stored in where.keys() - self._stored_as.values()}
        self.names = set(self._where)

    def close(self) -> None:
        """Close all files."""
        self._open.close()
        self._files.clear()

    def parts_left_out(self) -> dict[str, tuple[int, int]]:
        """Numbers of tensors and of parameters of each part of a multimodal folder that is not read."""
        counts: dict[str, tuple[int, int]] = {}
        for name in sorted(self._left_out):
            tensors, parameters = counts.get(part_of_multimodal(name), (0, 0))
            shape = self._file(self._left_out[name]).get_slice(name).get_shape()
            counts[part_of_multimodal(name)] = tensors + 1, parameters + prod(shape)
        return counts

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor."""
        return tuple(self._slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor. Errors: ``CheckpointError`` unless it is a floating-point dtype of weights."""
        stored = self._slice(name).get_dtype()
        if stored not in WEIGHT_DTYPES:
            raise CheckpointError(
                f"{self._where[name]}: {name} has the dtype {stored}; weights must be {', '.join(WEIGHT_DTYPES)}. "
                "Save the model in one of these dtypes: quantized weights are not supported"
            )
        return WEIGHT_DTYPES[stored]

    def read(self, name: str, index: tuple[slice, ...]) -> Tensor:
        """Read a part of a tensor; rows that ``index`` skips are read, too, because the format has ranges only."""
        steps = tuple(slice(None, None, dim.step) for dim in index)
        try:
            stored: Tensor = self._slice(name)[tuple(slice(stored.start, stored.stop) for stored in index)]
            return stored[steps]
        except SafetensorError as error:
            raise CheckpointError(f"{self._where[name]}: {name} cannot be read: {error}") from None

    def equal(self, name: str, other: str) -> bool:
        """Whether two tensors have the same shape and values."""
        shape = self.shape(name)
        if shape != self.shape(other):
            return False
        blocks = (
            slice(first_row, first_row + ROWS_AT_ONCE) for first_row in range(0, shape[0] if shape else 1, ROWS_AT_ONCE)
        )
        return all(
            torch.equal(self.read(name, (block,)[: len(shape)]), self.read(other, (block,)[: len(shape)]))
            for block in blocks
        )

    def _find(self) -> dict[str, Path]:
        """The file of each tensor, including tensors that the index does not list."""
        path = self.folder / self.weights
        index = self.folder / self.index
        if path.is_file():
            return dict.fromkeys(self._file(path).keys(), path)
        if not index.is_file():
            raise CheckpointError(
                f"{self.folder} has neither {self.weights} nor {self.index}; save the model with transformers' "
                "save_pretrained"
            )
        named = read_json(index, {"weight_map": OBJECT}).get("weight_map")
        if named is None:
            raise CheckpointError(f"{index} has no weight_map, the files of its tensors; copy the file again")
        by_file: dict[Path, list[str]] = defaultdict(list)
        for name, file in named.items():
            by_file[self._inside(name, file)].append(name)
        files = dict[str, Path]()
        unlisted = dict[str, Path]()
        for path, names in by_file.items():
            stored = set(self._file(path).keys())
            absent = [name for name in names if name not in stored]
            if absent:
                raise CheckpointError(
                    f"{index} names {path.name} for {listed(absent)}, but the file does not contain it; copy both again"
                )
            files |= dict.fromkeys(names, path)
            unlisted |= dict.fromkeys(stored - named.keys(), path)
        return unlisted | files

    def _inside(self, name: str, file: object) -> Path:
        index = self.folder / self.index
        if not isinstance(file, str):
            raise CheckpointError(f"{index} names {quoted(file)} for {name}; it must be the name of a file")
        if not file or Path(file).name != file or file == "..":
            raise CheckpointError(f"{index} names the file {quoted(file)}, which is not in the same folder")
        return self.folder / file

    def _slice(self, name: str) -> Any:
        return self._file(self._where[name]).get_slice(self._stored_as[name])

    def _file(self, path: Path) -> "safe_open | PickledFile":
        if path not in self._files and path.suffix == Path(PICKLED).suffix:
            self._files[path] = PickledFile(path)
        elif path not in self._files:
            try:
                self._files[path] = self._open.enter_context(safe_open(path, framework="pt"))
            except (OSError, ValueError, SafetensorError) as error:
                raise CheckpointError(f"{path} cannot be read: {error}; copy the file again") from None
        return self._files[path]


def read_json(path: Path, types: Mapping[str, KeyType] | None = None) -> dict[str, Any]:
    """The object in a JSON file of a model, with values of the ``types`` of its keys. Errors: ``CheckpointError``."""
    return read_object(path, CheckpointError, "give the folder of a downloaded model, or copy the file again", types)


NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}
NOTHING = re.compile("(?!)")
"""No Python object may be named."""


class PickledFile:
    """The tensors of a file of ``torch.save`` by name, memory-mapped unless the file has the format before torch 1.6.

    Errors: ``CheckpointError`` for a file that is damaged, names Python objects, or holds anything but tensors by name.
    """

    def __init__(self, path: Path) -> None:
        content = load_tensors(path, NOTHING)
        if not isinstance(content, dict) or not all(isinstance(value, Tensor) for value in content.values()):
            raise CheckpointError(f"{path} must contain tensors by name; save the state_dict of the model alone")
        self._tensors: dict[str, Tensor] = content

    def keys(self) -> list[str]:
        """The names of the tensors."""
        return list(self._tensors)

    def get_slice(self, name: str) -> "PickledSlice":
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
