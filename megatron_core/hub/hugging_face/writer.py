"""Export of a checkpoint as a Hugging Face folder, with one tensor in memory at a time."""

import json
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from megatron_core.checkpoint import TensorBox
from megatron_core.checkpoint.writer import write_safetensors
from megatron_core.config import ModelConfig
from megatron_core.hub.hugging_face.architecture import Architecture
from megatron_core.hub.hugging_face.files import INDEX, WEIGHTS
from megatron_core.hub.hugging_face.reader import CONFIG
from megatron_core.parallel.boxes import Box

MTP_PREFIX = "mtp."
"""Prefix of our weights in layers for multi-token prediction."""
Shapes = Mapping[str, tuple[int, ...]]


class Weights(Protocol):
    """Weights of a model that can be read by boxes."""

    @property
    def state(self) -> Mapping[str, Any]:
        """The state of the run, with its vocab_size."""
        ...

    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the values into the memory of each box."""
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
    dtype: torch.dtype,
    extra_keys: Mapping[str, Any],
    file_bytes: int = 5 * 10**9,
) -> None:
    """Write config.json and the weights of ``reader`` into ``folder``, in files of ``file_bytes`` at most.

    ``shapes`` are the global shapes of all weights by name. ``extra_keys`` are keys of config.json that do not follow
    from the model's settings. A tensor larger than ``file_bytes`` gets a file of its own. ``dtype``: see
    ``stored_dtype``.
    """
    names = [name for name in shapes if not name.startswith(MTP_PREFIX)]  # used in training only
    shapes = {name: shapes[name] for name in sorted(names, key=_natural)}
    own = {"vocab_size": reader.state["vocab_size"], "torch_dtype": str(dtype).removeprefix("torch.")}
    extra = {key: value for key, value in extra_keys.items() if value is not None or key not in architecture.not_null}
    hf_config = {**extra, **own, **architecture.config_json(model)}
    sizes = {name: _bytes(architecture, model, name, shape, dtype) for name, shape in shapes.items()}
    files = _files(shapes, sizes, file_bytes)
    weight_map: dict[str, str] = {}
    for number, ours in enumerate(files, 1):
        name = WEIGHTS if len(files) == 1 else f"model-{number:05d}-of-{len(files):05d}.safetensors"
        entries = [
            (key, stored_dtype(own, dtype), size)
            for own, shape in ours.items()
            for key, size in architecture.source(own).stored_shapes(model, shape).items()
        ]
        tensors = _stored_tensors(reader, architecture, model, ours, dtype)
        if number == len(files):
            constants = architecture.constants(model)
            entries += [(key, dtype, ()) for key in constants]
            tensors = chain(tensors, (torch.tensor(value, dtype=dtype) for value in constants.values()))
        write_safetensors(folder / name, entries, tensors, {"format": "pt"})
        weight_map |= dict.fromkeys((key for key, _, _ in entries), name)
    if len(files) > 1:
        _write_json(folder / INDEX, {"metadata": {"total_size": sum(sizes.values())}, "weight_map": weight_map})
    _write_json(folder / CONFIG, hf_config)


def _bytes(
    architecture: Architecture, model: ModelConfig, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> int:
    """Bytes of the stored tensors of our weight ``name``."""
    stored = architecture.source(name).stored_shapes(model, shape)
    return sum(map(prod, stored.values())) * stored_dtype(name, dtype).itemsize


def _files(shapes: Shapes, sizes: Mapping[str, int], file_bytes: int) -> list[dict[str, tuple[int, ...]]]:
    """Distribute our tensors, of ``sizes`` in bytes, over files."""
    files: list[dict[str, tuple[int, ...]]] = [{}]
    size = 0
    for name, shape in shapes.items():
        if size and size + sizes[name] > file_bytes:
            files.append({})
            size = 0
        files[-1][name] = shape
        size += sizes[name]
    return files


def _stored_tensors(
    reader: Weights, architecture: Architecture, model: ModelConfig, shapes: Shapes, dtype: torch.dtype
) -> Iterator[Tensor]:
    """The tensors to store, in the order of the stored names of ``shapes``."""
    for name, shape in shapes.items():
        whole = Box((0,) * len(shape), shape)
        ours = torch.empty(shape, dtype=stored_dtype(name, dtype))
        reader.fill([TensorBox(f"model.{name}", shape, whole, ours, owned=True)])
        source = architecture.source(name)
        if source.of_heads:
            yield from ours.view(-1, model.head_size)
            continue
        if source.rows is None:
            yield source.turned(ours)
            continue
        # Zeros: some rows of a table of positions belong to no position.
        stored = {key: ours.new_zeros(size) for key, size in source.stored_shapes(model, shape).items()}
        for key, index, own in source.parts(model, shape, whole):
            source.turned(stored[key])[index] = ours[own.index]
        yield from stored.values()


def _write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n")


def _natural(name: str) -> list[tuple[bool, int, str]]:
    """Sort key that places layer 10 after layer 9."""
    return [(part.isdigit(), int(part) if part.isdigit() else 0, part) for part in name.split(".")]
