"""The format ``torch_dist`` of Megatron-LM: chunks of global tensors in files of ``torch.distributed.checkpoint``."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.errors import CheckpointError, quoted
from megatron_core.hub.megatron_lm.flat_buffers import BUFFER, FlatBuffer, FlatState, bucket_limits, coalesced
from megatron_core.hub.megatron_lm.pickles import load_tensors
from megatron_core.hub.megatron_lm.tensor_map import (
    LAYER,
    MODEL,
    Sizes,
    TensorPart,
    TensorParts,
    plain_name,
    with_mixers,
)
from megatron_core.parallel.boxes import Box

STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(exp_avg|exp_avg_sq|fp32_param|param)\.(.*)")
"""The state of a parameter; some releases number the optimizers of dense layers and of experts."""
KINDS = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "fp32_param": "main", "param": "main"}
COUNTS = re.compile(r"(?:chained_0\.)?optimizer\.distributed\.dp_group_idx_0\.optimizer/shard_0_1")
GATHERED = re.compile(r"(?:chained_(\d+)\.)?optimizer\.distributed\.dp_group_idx_(\d+)\.param_state/shard_0_1")


class DistributedFiles:
    """The tensors and objects in a folder with ``.metadata``."""

    def __init__(self, folder: Path, metadata: Any) -> None:
        self.folder = folder
        self._entries, self._storage = _indexed(metadata)
        self._shapes = {
            (name, tuple(chunk.offsets)): tuple(chunk.sizes)
            for name, entry in self._entries.items()
            for chunk in getattr(entry, "chunks", ())
        }
        self._last: tuple[Any, Tensor] | None = None
        content = self._content()
        arguments = getattr(content.get("args") if isinstance(content, dict) else None, "arguments", None)
        if not isinstance(arguments, dict):
            raise CheckpointError(f"{folder} has no arguments of the training, which describe the model")
        self.arguments: Mapping[str, Any] = arguments
        self.common: Mapping[str, Any] = content

    def _content(self) -> Any:
        """The state of the training without its tensors."""
        common = self.folder / "common.pt"
        content = load_tensors(common) if common.is_file() else self._object("common_state/shard_0_1")
        is_wrapped = isinstance(content, list) and len(content) == 1  # as Megatron Core 0.19 and 0.20 store it
        return content[0] if is_wrapped else content

    def parts(self, model: ModelConfig) -> TensorParts:
        """All stored parts of our weights by name."""
        weights: TensorParts = {}
        for stored in self._entries:
            if stored.startswith(MODEL):
                self._add(weights, stored, stored)
        return with_mixers(without_copies(weights, model), model)

    def optimizer_parts(self, model: ModelConfig) -> dict[str, TensorParts]:
        """The parts of each kind of Adam's state; empty if it is absent or its order of parameters is unknown."""
        states: dict[str, TensorParts] = {}
        for stored in self._entries:
            if (match := STATE.fullmatch(stored)) is not None:
                self._add(states.setdefault(KINDS[match[1]], {}), stored, match[2])
        if states:
            return {
                state_kind: with_mixers(without_copies(tensor_parts, model), model)
                for state_kind, tensor_parts in states.items()
            }
        buffers = self._buffers()
        if not buffers[False]:
            return {}
        sizes = Sizes.of(self.arguments)
        limits = bucket_limits(self.arguments)
        return FlatState(model, sizes, self.parts(model), buffers, limits).parts()

    def optimizer_counts(self) -> Any:
        """The optimizer's step and parameter groups; some formats store them for each model-parallel rank."""
        name = next((name for name in self._entries if COUNTS.fullmatch(name)), None)
        optimizer = self.common.get("optimizer") if name is None else self._object(name)
        if isinstance(optimizer, dict) and 0 in optimizer:
            optimizer = optimizer[0]
        return optimizer[0] if isinstance(optimizer, list) and optimizer else optimizer

    @property
    def has_flat_buffers(self) -> bool:
        """Whether the optimizer's state is in flat buffers."""
        return any(BUFFER.fullmatch(name) or GATHERED.fullmatch(name) for name in self._entries)

    def _buffers(self) -> dict[bool, dict[int, list[FlatBuffer]]]:
        """The flat buffers of dense layers and of experts by model-parallel rank; those of several dtypes are left out.

        The formats are ``dp_reshardable``, with a tensor for each bucket, and ``dp_zero_gather_scatter``.
        """
        prefixes: dict[tuple[bool, int], dict[int, dict[int, str]]] = {}
        by_experts: dict[bool, dict[int, list[FlatBuffer]]] = {False: {}, True: {}}
        for name in self._entries:
            if (match := BUFFER.fullmatch(name)) is not None:
                of_rank = prefixes.setdefault((match[1] not in (None, "0"), int(match[2])), {})
                of_rank.setdefault(int(match[3]), {})[int(match[5])] = name.removesuffix("param")
            elif (match := GATHERED.fullmatch(name)) is not None:
                content = self._object(name)
                content = content[0] if isinstance(content, list) and content else content
                if isinstance(content, dict):
                    by_experts[match[1] not in (None, "0")][int(match[2])] = coalesced(content)
        for (of_experts, rank), buffers in prefixes.items():
            of_rank_buffers = by_experts[of_experts].setdefault(rank, [])
            for _, buckets in sorted(buffers.items()):
                names = [name for _, name in sorted(buckets.items())]
                sizes = tuple(int(self._entries[name + "param"].size[0]) for name in names)
                of_rank_buffers.append(FlatBuffer(sizes, partial(self._flat, names)))
        return by_experts

    def _flat(self, names: list[str], state_kind: str, bucket: int, start: int, stop: int) -> Tensor:
        """Read a range of a bucket."""
        name = names[bucket] + state_kind
        values_of_range = torch.zeros(stop - start)
        for chunk in self._entry(name).chunks:
            first = max(start, chunk.offsets[0])
            end = min(stop, chunk.offsets[0] + chunk.sizes[0])
            if first < end:
                values = self._chunk(name, tuple(chunk.offsets))
                values_of_range[first - start : end - start] = values[first - chunk.offsets[0] : end - chunk.offsets[0]]
        return values_of_range

    def _entry(self, name: str) -> Any:
        if name not in self._entries:
            raise CheckpointError(f"{self.folder}: its metadata does not list {name}; copy the whole checkpoint")
        return self._entries[name]

    def _add(self, weights: TensorParts, stored: str, name: str) -> None:
        """Add the parts of the tensor ``stored``, which belongs to the weight ``name``."""
        size, weight = (tuple(getattr(self._entries.get(label), "size", ())) for label in (stored, name))
        weight = weight or size
        if not size or "_extra_state" in name or len(size) - len(weight) not in (0, 1):
            return
        blocks = self._blocks(stored, size) if len(size) == len(weight) else self._flattened(stored, size, weight)
        for block in blocks:
            for ours, block_part in _places(name, weight, block):
                weights.setdefault(ours, []).append(block_part)

    def _blocks(self, stored: str, size: tuple[int, ...]) -> Iterator[TensorPart]:
        """The chunks of a tensor."""
        for chunk in self._entries[stored].chunks:
            box = Box(tuple(chunk.offsets), tuple(a + b for a, b in zip(chunk.offsets, chunk.sizes, strict=True)))
            yield TensorPart(box, partial(self._chunk, stored, box.start))

    def _flattened(self, stored: str, size: tuple[int, ...], weight: tuple[int, ...]) -> Iterator[TensorPart]:
        """The blocks of a tensor in the format ``fully_sharded_model_space``.

        ``size`` is (number of blocks in each dimension of ``weight``, elements of a block); chunks are ranges of a
        block's elements.
        """
        shape = tuple(n // blocks for n, blocks in zip(weight, size[:-1], strict=True))
        starts: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        for chunk in self._entries[stored].chunks:
            starts.setdefault(tuple(chunk.offsets[:-1]), []).append(tuple(chunk.offsets))
        for number, chunks in starts.items():
            start = tuple(n * length for n, length in zip(number, shape, strict=True))
            box = Box((0,) * len(shape), shape).shifted(start)
            yield TensorPart(box, partial(self._joined, stored, sorted(chunks), shape))

    def _joined(self, stored: str, chunks: list[tuple[int, ...]], shape: tuple[int, ...]) -> Tensor:
        values = torch.cat([self._chunk(stored, start).flatten() for start in chunks])
        if values.numel() != torch.Size(shape).numel():
            raise CheckpointError(f"{self.folder}: {stored} is incomplete; copy the whole checkpoint")
        return values.view(shape)

    def _chunk(self, name: str, offset: tuple[int, ...]) -> Tensor:
        """Read a chunk; the last one is cached for chunks that are read layer by layer."""
        if self._last is None or self._last[0] != (name, offset):
            values = load_tensors(self._bytes(name, offset), name=f"{name} in {self.folder}")
            if not isinstance(values, Tensor):
                raise CheckpointError(f"{self.folder}: {name} is a {type(values).__name__}, not a tensor")
            if tuple(values.shape) != self._shapes[name, offset]:
                raise CheckpointError(
                    f"{self.folder}: a chunk of {name} has the shape {list(values.shape)}, its metadata says "
                    f"{list(self._shapes[name, offset])}; copy the whole checkpoint again"
                )
            self._last = ((name, offset), values)
        return self._last[1]

    def _object(self, name: str) -> Any:
        if name not in self._entries:
            raise CheckpointError(
                f"{self.folder} has neither common.pt nor {name} nor args, so that another program than Megatron-LM "
                "wrote it; convert it to --ckpt-format torch_dist or to a model of Hugging Face there"
            )
        return load_tensors(self._bytes(name, None), name=f"{name} in {self.folder}")

    def _bytes(self, name: str, offset: tuple[int, ...] | None) -> bytes:
        info = self._storage.get((name, offset))
        if info is None:
            raise CheckpointError(f"{self.folder}: its metadata does not list {name}; copy the whole checkpoint")
        path = self.folder / info.relative_path
        if path.parent != self.folder:
            raise CheckpointError(f"{self.folder} names the file {quoted(info.relative_path)} outside the folder")
        if getattr(info, "transform_descriptors", None):
            raise CheckpointError(f"{path} is compressed, which is not supported; save it uncompressed")
        if not path.is_file():  # opening a named pipe would block
            raise CheckpointError(f"{path} is missing or not a file, and contains {name}; copy the whole checkpoint")
        try:
            with path.open("rb") as file:
                if info.offset + info.length > os.fstat(file.fileno()).st_size:
                    raise CheckpointError(f"{path} is truncated: {name} is incomplete; copy the whole checkpoint")
                file.seek(info.offset)
                return file.read(info.length)
        except (OSError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be read: {error}") from None


def _indexed(metadata: Any) -> tuple[dict[str, Any], dict[tuple[str, tuple[int, ...] | None], Any]]:
    """The entries by name, and the places of chunks by name and offset; of objects by name and None."""
    entries = metadata.state_dict_metadata
    places = {
        (index.fqn, tuple(index.offset or ()) if hasattr(entries.get(index.fqn), "chunks") else None): info
        for index, info in metadata.storage_data.items()
    }
    return entries, places


def without_copies(tensor_parts: TensorParts, model: ModelConfig) -> TensorParts:
    """The parts without the output layer's copy of a tied embedding, and each part once of norms with two names."""
    tensor_parts = {
        name: list({piece.box: piece for piece in pieces}.values()) for name, pieces in tensor_parts.items()
    }
    if model.share_embeddings_and_output_weights:
        tensor_parts.pop("output_layer.weight", None)
    return tensor_parts


def _places(name: str, size: tuple[int, ...], chunk: TensorPart) -> Iterator[tuple[str, TensorPart]]:
    """The parts of our tensors in a chunk: one for each layer if layers are stacked."""
    box = chunk.box
    read = chunk.read
    layer = LAYER.fullmatch(name)
    if layer is not None or not name.startswith("decoder.layers."):
        ours = name if layer is None else f"{layer[1]}.layers.{layer[2]}.{plain_name(layer[3])}"
        yield _half(ours, size, chunk)
        return
    local_name = plain_name(name.removeprefix("decoder.layers."))
    inner = Box(box.start[1:], box.stop[1:])
    for number in range(box.start[0], box.stop[0]):
        layer_part = TensorPart(inner, partial(_row, read, number - box.start[0]))
        yield _half(f"decoder.layers.{number}.{local_name}", size[1:], layer_part)


def _row(read: Any, index: int) -> Tensor:
    return read()[index]


def _half(name: str, size: tuple[int, ...], half: TensorPart) -> tuple[str, TensorPart]:
    """Shift the second half of a gated layer, whose halves may be stored as ``NAME_w`` and ``NAME_v``."""
    if not name.endswith(("_w", "_v")):
        return name, half
    axis = len(size) - 2 if name[:-2].endswith("weight") else len(size) - 1
    shift = tuple(size[axis] if i == axis and name.endswith("_v") else 0 for i in range(len(size)))
    return name[:-2], replace(half, box=half.box.shifted(shift))
