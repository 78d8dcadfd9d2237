"""Locate the parts of our tensors in Megatron-LM's files, formats ``torch`` and ``torch_dist``."""

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.errors import CheckpointError
from megatron_core.models.megatron_lm.flat_buffers import KINDS, ORDERS, buckets_of, registered, split
from megatron_core.models.megatron_lm.pickles import load_metadata, load_tensors
from megatron_core.parallel.boxes import Box

FUSED = {
    "self_attention.linear_qkv.layer_norm": "input_layernorm.",
    "mlp.linear_fc1.layer_norm": "pre_mlp_layernorm.",
    "self_attention.linear_q_up_proj.layer_norm": "self_attention.q_layernorm.",
    "self_attention.linear_kv_up_proj.layer_norm": "self_attention.kv_layernorm.",
}
"""Norms that Transformer Engine fuses into the following layer -> their names here."""
ROWS = re.compile(
    r"(word_embeddings|output_layer|linear_qkv|linear_q_proj|linear_q_up_proj|linear_kv_up_proj|linear_fc1)\.(weight|bias)$"
    r"|self_attention\.softmax_offset$"
)
COLUMNS = re.compile(r"(linear_proj|linear_fc2)\.weight$")
LAYER = re.compile(r"decoder\.layers\.(\d+)\.(.*)")
EXPERT = re.compile(
    r"mlp\.experts\.(?:local_experts\.(\d+)\.(linear_fc[12]\.(?:weight|bias))|(linear_fc[12]\.(?:weight|bias))(\d+))"
)
MODEL = ("embedding.", "decoder.", "output_layer.")


@dataclass(frozen=True)
class TensorPart:
    """A box of one of our tensors, and a function that reads its values."""

    box: Box
    read: Callable[[], Tensor]


TensorParts = dict[str, list[TensorPart]]


def plain_name(rest: str) -> str:
    """Translate a name inside a layer to ours."""
    for theirs, ours in FUSED.items():
        if rest.startswith(theirs + "_"):
            return ours + rest.rpartition("_")[2]
    return rest.replace("mlp.experts.experts.", "mlp.experts.").replace(
        "core_attention.softmax_offset", "softmax_offset"
    )


class RankFiles:
    """The format ``torch``: a file for each rank of the model, ``mp_rank_00_001/model_optim_rng.pt``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files = {path.parent.name: path for path in sorted(folder.glob("mp_rank_*/model_optim_rng.pt"))}
        self._content: dict[str, Any] = {}
        first = self._load(next(iter(self._files)))
        arguments = getattr(first.get("args"), "arguments", None)
        if not isinstance(arguments, dict):
            raise CheckpointError(f"{folder} has no arguments of the training, which describe the model")
        self.arguments: Mapping[str, Any] = arguments
        self.common: Mapping[str, Any] = first
        self._tp, self._pp, self._ep = (
            int(arguments.get(f"{name}_model_parallel_size") or 1) for name in ("tensor", "pipeline", "expert")
        )
        if self._ep > 1 and (arguments.get("expert_tensor_parallel_size") or self._tp) != self._tp:
            raise CheckpointError(
                f"{folder}: expert_tensor_parallel_size={arguments['expert_tensor_parallel_size']} differs from "
                "the tensor-parallel size; this is supported only with --ckpt-format torch_dist"
            )

    def parts(self, model: ModelConfig, kind: str | None = None) -> TensorParts:
        """All stored parts of our tensors by name: weights, or a ``kind`` of optimizer state."""
        if model.query_groups % self._tp:
            raise CheckpointError(
                f"{self.folder}: {model.query_groups} key-value groups on {self._tp} tensor-parallel ranks are "
                "supported only with --ckpt-format torch_dist"
            )
        found: TensorParts = {}
        chunks = sorted(key for key in self._state(0, 0, 0) if re.fullmatch(r"model\d*", key))
        before = 0
        for chunk in chunks:
            for pp in range(self._pp):
                numbers = set()
                for tp in range(self._tp):
                    for ep in range(self._ep):
                        state = self._state(tp, pp, ep)
                        tensors = state.get(chunk, {}) if kind is None else self._adam(state, kind)
                        for name, tensor in tensors.items():
                            layer = LAYER.fullmatch(name.removeprefix("module."))
                            numbers |= {int(layer[1])} if layer else set()
                            self._add(found, name, tensor, tp, ep, before, model)
                before += len(numbers)
        if model.share_embeddings_and_output_weights:
            found.pop("output_layer.weight", None)  # a copy on the last stage
        return found

    def optimizer_parts(self, model: ModelConfig) -> dict[str, TensorParts]:
        """The parts of each kind of Adam's state; empty if the state is absent, distributed or of several chunks."""
        optimizer = self.common.get("optimizer")
        optimizer = optimizer.get("optimizer", optimizer) if isinstance(optimizer, dict) else None
        if not isinstance(optimizer, dict) or not optimizer.get("state") or "model" not in self.common:
            return {}
        kinds = ["exp_avg", "exp_avg_sq"] + ["main"] * ("fp32_from_fp16_params" in self.common["optimizer"])
        return {kind: self.parts(model, kind) for kind in kinds}

    def optimizer_counts(self) -> Any:
        """The optimizer's step and parameter groups."""
        return self.common.get("optimizer")

    def _adam(self, state: Mapping[str, Any], kind: str) -> dict[str, Tensor]:
        """One kind of a rank's Adam state by parameter; it is stored for matrices first, then for vectors."""
        names = [n for n, t in state["model"].items() if isinstance(t, Tensor) and not n.endswith("_extra_state")]
        names.sort(key=lambda name: state["model"][name].dim() < 2 or name.endswith(".bias"))
        optimizer = state["optimizer"]
        if kind == "main":
            tensors = [tensor for group in optimizer["fp32_from_fp16_params"] for tensor in group]
        else:
            numbered = optimizer.get("optimizer", optimizer)["state"]
            tensors = [numbered[number][kind] for number in sorted(numbered)]
        shapes = [state["model"][name].shape for name in names]
        if [tensor.shape for tensor in tensors] != shapes:
            raise CheckpointError(
                f"{self.folder}: the optimizer's {kind} does not have the shapes of the weights; convert the weights "
                "alone with --no-optimizer"
            )
        return dict(zip(names, tensors, strict=True))

    def _add(
        self, found: TensorParts, name: str, tensor: Any, tp: int, ep: int, before: int, model: ModelConfig
    ) -> None:
        name = name.removeprefix("module.")
        if not isinstance(tensor, Tensor) or name.endswith("_extra_state"):
            return
        layer = LAYER.fullmatch(name)
        rest = plain_name(layer[2]) if layer else name
        expert = EXPERT.fullmatch(rest)
        if ep and expert is None:
            return  # replicated in an expert-parallel group
        number: int | None = None
        if expert is not None:
            assert model.num_experts is not None
            number = int(expert[1] or expert[4]) + ep * (model.num_experts // self._ep)
            rest = f"mlp.experts.{expert[2] or expert[3]}"
        ours = f"decoder.layers.{before + int(layer[1])}.{rest}" if layer else rest
        parts = found.setdefault(ours, [])
        for part in _local_parts(rest, tensor, tp, self._tp, model.gated_linear_unit):
            parts.append(part if number is None else _of_expert(part, number))

    def _state(self, tp: int, pp: int, ep: int) -> dict[str, Any]:
        """The content of a rank's file."""
        name = f"mp_rank_{tp:02d}" + f"_{pp:03d}" * (self._pp > 1) + f"_{ep:03d}" * (self._ep > 1)
        if name not in self._files:
            raise CheckpointError(f"{self.folder} has no {name}/model_optim_rng.pt; copy the whole checkpoint")
        return self._load(name)

    def _load(self, name: str) -> dict[str, Any]:
        if name not in self._content:
            content = load_tensors(self._files[name])
            if not isinstance(content, dict):
                raise CheckpointError(
                    f"{self._files[name]} contains a {type(content).__name__}; it must contain a dict"
                )
            self._content[name] = content
        return self._content[name]


def _local_parts(name: str, tensor: Tensor, rank: int, size: int, gated: bool) -> Iterator[TensorPart]:
    """A tensor-parallel rank's tensor as boxes of the whole tensor."""
    shape = tuple(tensor.shape)
    zero = (0,) * len(shape)
    if ROWS.search(name):
        halves = tensor.chunk(2) if gated and "linear_fc1." in name else (tensor,)
        for half, own in enumerate(halves):
            first = (half * size + rank) * own.shape[0]
            yield _part(own, (first, *zero[1:]))
    elif COLUMNS.search(name):
        yield _part(tensor, (0, rank * shape[1]))
    elif rank == 0:
        yield _part(tensor, zero)


def _local_weights(weights: TensorParts, rank: int, size: int, gated: bool) -> dict[str, Tensor]:
    """A tensor-parallel rank's part of every weight."""
    found = {}
    for name, parts in weights.items():
        whole = torch.zeros(tuple(max(ends) for ends in zip(*(p.box.stop for p in parts), strict=True)))
        whole = whole.to(parts[0].read().dtype)
        for part in parts:
            whole[part.box.index] = part.read()
        if ROWS.search(name):
            halves = whole.chunk(2) if gated and "linear_fc1." in name else (whole,)
            whole = torch.cat([half.chunk(size)[rank] for half in halves])
        elif COLUMNS.search(name):
            whole = whole.chunk(size, dim=1)[rank]
        found[name] = whole
    return found


def _part(tensor: Tensor, start: tuple[int, ...]) -> TensorPart:
    return TensorPart(Box((0,) * len(start), tuple(tensor.shape)).shifted(start), lambda: tensor)


def _of_expert(part: TensorPart, number: int) -> TensorPart:
    box = Box((number, *part.box.start), (number + 1, *part.box.stop))
    return TensorPart(box, lambda: part.read()[None])


def _row(read: Callable[[], Tensor], at: int) -> Tensor:
    return read()[at]


class DistributedFiles:
    """The format ``torch_dist``: chunks of global tensors in the files of ``torch.distributed.checkpoint``."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metadata = load_metadata(folder / ".metadata")
        common = folder / "common.pt"
        content = load_tensors(common) if common.is_file() else self._object("common_state/shard_0_1")
        if isinstance(content, list) and len(content) == 1:  # as Megatron Core 0.19 and 0.20 store it
            content = content[0]
        arguments = getattr(content.get("args") if isinstance(content, dict) else None, "arguments", None)
        if not isinstance(arguments, dict):
            raise CheckpointError(f"{folder} has no arguments of the training, which describe the model")
        self.arguments: Mapping[str, Any] = arguments
        self.common: Mapping[str, Any] = content
        self._last: tuple[Any, Tensor] | None = None

    def parts(self, model: ModelConfig, prefix: str = "") -> TensorParts:
        """All stored parts of our tensors by name: weights, or the optimizer state with ``prefix``."""
        found: TensorParts = {}
        for stored, entry in self._metadata.state_dict_metadata.items():
            name = stored.removeprefix(prefix)
            if not stored.startswith(prefix) or not name.startswith(MODEL) or "_extra_state" in name:
                continue
            for chunk in getattr(entry, "chunks", ()):
                box = Box(tuple(chunk.offsets), tuple(a + b for a, b in zip(chunk.offsets, chunk.sizes, strict=True)))
                read = partial(self._chunk, stored, box.start)
                for ours, part in self._places(name, tuple(entry.size), TensorPart(box, read)):
                    found.setdefault(ours, []).append(part)
        if model.share_embeddings_and_output_weights:
            found.pop("output_layer.weight", None)
        return found

    def optimizer_parts(self, model: ModelConfig) -> dict[str, TensorParts]:
        """The parts of each kind of Adam's state; empty if the state is absent or in flat buffers."""
        kinds = {"exp_avg": ("exp_avg",), "exp_avg_sq": ("exp_avg_sq",), "main": ("fp32_param", "param")}
        found = {ours: [self.parts(model, f"optimizer.state.{kind}.") for kind in kinds[ours]] for ours in kinds}
        by_name = {ours: next(filter(None, parts)) for ours, parts in found.items() if any(parts)}
        return by_name or self._flat_parts(model)

    def optimizer_counts(self) -> Any:
        """The optimizer's step and parameter groups; ``dp_reshardable`` stores them for each model-parallel rank."""
        name = "optimizer.distributed.dp_group_idx_0.optimizer/shard_0_1"
        if name not in self._metadata.state_dict_metadata:
            return self.common.get("optimizer")
        found = self._object(name)
        return found[0] if isinstance(found, list) and found else found

    def _flat_parts(self, model: ModelConfig) -> dict[str, TensorParts]:
        """Adam's state from the flat buffers of the distributed optimizer; empty if their order is unknown."""
        ranks, weights = buckets_of(self._metadata.state_dict_metadata), self.parts(model)
        tp, pp = (int(self.arguments.get(f"{name}_model_parallel_size") or 1) for name in ("tensor", "pipeline"))
        tied = model.share_embeddings_and_output_weights and pp > 1
        if len(ranks) != tp * pp or tied or model.num_experts or model.num_layers % pp or model.query_groups % tp:
            return {}
        found: dict[str, TensorParts] = {"exp_avg": {}, "exp_avg_sq": {}, "main": {}}
        for rank, names in ranks.items():
            stage, each = rank // tp, model.num_layers // pp
            layers = range(stage * each, (stage + 1) * each)
            own = _local_weights(weights, rank % tp, tp, model.gated_linear_unit)
            shapes = {name: tuple(tensor.shape) for name, tensor in own.items()}
            buckets = {kind: [self._flat(name + kind) for name in names] for kind in KINDS}
            ends = {"first": stage == 0, "last": stage == pp - 1}
            orders = [registered(shapes, order, layers, **ends) for order in ORDERS]
            state = next(filter(None, (split(order, shapes, buckets, own.__getitem__) for order in orders)), None)
            if state is None:
                return {}
            for kind, theirs in zip(("main", "exp_avg", "exp_avg_sq"), KINDS, strict=True):
                for name, tensor in state[theirs].items():
                    parts = _local_parts(name, tensor, rank % tp, tp, model.gated_linear_unit)
                    found[kind].setdefault(name, []).extend(parts)
        return found

    def _flat(self, name: str) -> Tensor:
        """Read a whole flat tensor."""
        entry = self._metadata.state_dict_metadata[name]
        whole = torch.zeros(tuple(entry.size))
        for chunk in entry.chunks:
            start = chunk.offsets[0]
            whole[start : start + chunk.sizes[0]] = self._chunk(name, tuple(chunk.offsets))
        return whole

    def _places(self, name: str, size: tuple[int, ...], chunk: TensorPart) -> Iterator[tuple[str, TensorPart]]:
        """The parts of our tensors in a chunk: one for each layer if layers are stacked."""
        box, read = chunk.box, chunk.read
        layer = LAYER.fullmatch(name)
        if layer is not None or not name.startswith("decoder.layers."):
            ours = name if layer is None else f"decoder.layers.{layer[1]}.{plain_name(layer[2])}"
            yield self._half(ours, size, chunk)
            return
        rest = plain_name(name.removeprefix("decoder.layers."))
        inner = Box(box.start[1:], box.stop[1:])
        for number in range(box.start[0], box.stop[0]):
            part = TensorPart(inner, partial(_row, read, number - box.start[0]))
            yield self._half(f"decoder.layers.{number}.{rest}", size[1:], part)

    def _half(self, name: str, size: tuple[int, ...], part: TensorPart) -> tuple[str, TensorPart]:
        """Shift the second half of a gated layer, whose halves may be stored as ``NAME_w`` and ``NAME_v``."""
        if not name.endswith(("_w", "_v")):
            return name, part
        axis = len(size) - 2 if name[:-2].endswith("weight") else len(size) - 1
        shift = tuple(size[axis] if i == axis and name.endswith("_v") else 0 for i in range(len(size)))
        return name[:-2], replace(part, box=part.box.shifted(shift))

    def _chunk(self, name: str, offset: tuple[int, ...]) -> Tensor:
        """Read a chunk; the last one is cached for chunks that are read layer by layer."""
        if self._last is None or self._last[0] != (name, offset):
            found = load_tensors(self._bytes(name, offset))
            if not isinstance(found, Tensor):
                raise CheckpointError(f"{self.folder}: {name} is a {type(found).__name__}, not a tensor")
            self._last = ((name, offset), found)
        return self._last[1]

    def _object(self, name: str) -> Any:
        if name not in self._metadata.state_dict_metadata:
            raise CheckpointError(f"{self.folder} has neither common.pt nor {name}")
        return load_tensors(self._bytes(name, None))

    def _bytes(self, name: str, offset: tuple[int, ...] | None) -> bytes:
        for index, info in self._metadata.storage_data.items():
            if index.fqn == name and (offset is None or tuple(index.offset or ()) == offset):
                path = self.folder / info.relative_path
                if path.parent != self.folder:
                    raise CheckpointError(f"{self.folder} names the file {info.relative_path!r} outside the folder")
                if getattr(info, "transform_descriptors", None):
                    raise CheckpointError(f"{path} is compressed, which is not supported; save it uncompressed")
                try:
                    with path.open("rb") as file:
                        file.seek(info.offset)
                        data = file.read(info.length)
                except OSError as error:
                    raise CheckpointError(f"{path} cannot be read: {error}") from None
                if len(data) != info.length:
                    raise CheckpointError(f"{path} is truncated: {name} is incomplete; copy the whole checkpoint")
                return data
        raise CheckpointError(f"{self.folder}: its metadata does not list {name}; copy the whole checkpoint")
