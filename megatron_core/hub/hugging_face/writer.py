"""Export of a checkpoint as a Hugging Face folder, with one tensor in memory at a time."""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_core.checkpoint import TensorBox
from megatron_core.checkpoint.writer import Entry, write_safetensors
from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import Architecture
from megatron_core.hub.hugging_face.files import INDEX, WEIGHTS
from megatron_core.hub.hugging_face.reader import CONFIG, EMBEDDING
from megatron_core.parallel.boxes import Box

MTP_PREFIX = "mtp."
"""Prefix of our weights in layers for multi-token prediction."""
Shapes = Mapping[str, tuple[int, ...]]
Group = tuple[Sequence[Entry], Callable[[], Iterable[Tensor]]]
"""Tensors of one file: names, dtypes and shapes, and a function that reads them."""


class Weights(Protocol):
    """Weights of a model that can be read by boxes."""

    @property
    def state(self) -> Mapping[str, Any]:
        """The state of the run, with its vocab_size."""
        ...

    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the values into the memory of each box."""
        ...

    def dtype_of(self, name: str) -> torch.dtype:
        """The stored dtype of a weight."""
        ...


def stored_dtype(name: str, dtype: torch.dtype) -> torch.dtype:
    """The dtype in which our weight ``name`` is stored: ``dtype``, but at least float32 for the routers' expert biases.

    Their differences decide about experts. Training and transformers keep them in float32, too.
    """
    return torch.promote_types(dtype, torch.float32) if name.endswith("router.expert_bias") else dtype


def write_hugging_face(
    reader: Weights,
    folder: Path,
    architecture: Architecture,
    model: ModelConfig,
    shapes: Shapes,
    *,
    dtype: torch.dtype | None,
    extra_keys: Mapping[str, Any],
) -> None:
    """Write config.json and the weights of ``reader`` into ``folder``.

    ``shapes`` are the global shapes of all weights by name. ``extra_keys`` are keys of config.json that do not follow
    from the model's settings. ``dtype``: see ``stored_dtype``; by default that of each stored weight.
    """
    names = [name for name in shapes if not name.startswith(MTP_PREFIX)]  # used in training only
    dtypes = {name: stored_dtype(name, dtype or reader.dtype_of(f"model.{name}")) for name in names}
    main_dtype = dtype or dtypes[EMBEDDING]
    weights_keys = {"vocab_size": reader.state["vocab_size"], "torch_dtype": str(main_dtype).removeprefix("torch.")}
    extra = {key: value for key, value in extra_keys.items() if value is not None or key not in architecture.not_null}
    groups = list[Group]()
    for name in sorted(names, key=_natural):
        stored = architecture.source(name).stored_shapes(model, shapes[name])
        entries = [(key, dtypes[name], size) for key, size in stored.items()]
        groups.append((entries, partial(stored_tensors, reader, architecture, model, name, shapes[name], dtypes[name])))
    constants = architecture.constants(model)
    values = [torch.tensor(value, dtype=main_dtype) for value in constants.values()]
    groups.append(([(key, main_dtype, ()) for key in constants], lambda: values))
    write_weights(folder, groups)
    _write_json(folder / CONFIG, {**extra, **weights_keys, **architecture.config_json(model)})


def write_weights(folder: Path, groups: Iterable[Group], file_bytes: int = 5 * 10**9) -> None:
    """Write the tensors of ``groups`` in files of ``file_bytes`` at most, with an index if there are several files.

    A group is never divided; one of more than ``file_bytes`` has a file of its own.
    """
    files: list[list[Group]] = [[]]
    size = total = 0
    for group in groups:
        nbytes = sum(prod(shape) * dtype.itemsize for _, dtype, shape in group[0])
        if size and size + nbytes > file_bytes:
            files.append([])
            size = 0
        files[-1].append(group)
        size += nbytes
        total += nbytes
    weight_map: dict[str, str] = {}
    for number, in_file in enumerate(files, 1):
        name = WEIGHTS if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        entries = [entry for entries, _ in in_file for entry in entries]
        tensors = (tensor for _, read in in_file for tensor in read())
        write_safetensors(folder / name, entries, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys((key for key, _, _ in entries), name)
    if len(files) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})


def read_whole(reader: Weights, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Read one complete tensor."""
    tensor = torch.empty(shape, dtype=dtype)
    reader.fill([TensorBox(name, shape, Box((0,) * len(shape), shape), tensor, owned=True)])
    return tensor


def stored_tensors(
    reader: Weights,
    architecture: Architecture,
    model: ModelConfig,
    name: str,
    shape: tuple[int, ...],
    dtype: torch.dtype,
) -> Iterable[Tensor]:
    """The stored tensors that hold our weight ``name``, in the order of ``TensorSource.stored_shapes``."""
    ours = read_whole(reader, f"model.{name}", shape, stored_dtype(name, dtype))
    source = architecture.source(name)
    if source.of_heads:
        return ours.view(-1, model.head_size)
    if source.rows is None:
        stored_whole = source.turned(ours)
        return [stored_whole] if len(source.stored_shapes(model, shape)) == 1 else stored_whole.unbind()
    # Zeros: some rows of a table of positions belong to no position.
    stored = {key: ours.new_zeros(size) for key, size in source.stored_shapes(model, shape).items()}
    for key, index, piece in source.parts(model, shape, Box((0,) * len(shape), shape)):
        source.turned(stored[key])[index] = ours[piece.index]
    return stored.values()


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key that places layer 10 after layer 9."""
    return [(word.isdigit(), int(word) if word.isdigit() else 0, word) for word in name.split(".")]
