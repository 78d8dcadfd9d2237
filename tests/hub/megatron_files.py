"""Checkpoints in Megatron-LM's formats, created from known weights by its documented rules."""

from __future__ import annotations

import argparse
import enum
import io
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.checkpoint import FileSystemWriter, save
from torch.distributed.checkpoint.default_planner import create_default_global_save_plan
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

Weights = Mapping[str, Tensor]
FUSED = {
    "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
    "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
}
"""Names of norms with Transformer Engine."""


def arguments(monkeypatch: pytest.MonkeyPatch, **settings: Any) -> argparse.Namespace:
    """The arguments of a training, including an enumeration of Megatron-LM whose class exists only here."""
    for name in ("megatron", "megatron.core", "megatron.core.enums"):
        monkeypatch.setitem(sys.modules, name, types.ModuleType(name))
    kind = enum.Enum("ModelType", {"encoder_or_decoder": 1}, module="megatron.core.enums")
    sys.modules["megatron.core.enums"].ModelType = kind
    return argparse.Namespace(model_type=kind.encoder_or_decoder, params_dtype=torch.float32, **settings)


def further() -> dict[str, Any]:
    """State other than the weights."""
    random = {"np_rng_state": np.random.RandomState(1).get_state(), "torch_rng_state": torch.get_rng_state()}
    return {"checkpoint_version": 3.0, "iteration": 7, "rng_state": [random], "opt_param_scheduler": {"max_lr": 0.1}}


def layer_of(name: str) -> int | None:
    return int(name.split(".")[2]) if name.startswith("decoder.layers.") else None


def write_rank_files(
    folder: Path, weights: Weights, args: argparse.Namespace, *, chunks: int = 1, fused: bool = False
) -> Path:
    """``--ckpt-format torch`` of the layout in ``args``, with ``chunks`` of layers on each pipeline rank."""
    tp, pp, ep = (getattr(args, f"{n}_model_parallel_size", 1) for n in ("tensor", "pipeline", "expert"))
    each = args.num_layers // (pp * chunks)
    for p in range(pp):
        for t in range(tp):
            for e in range(ep):
                content = {"args": args, **further()}
                for c in range(chunks):
                    first = (c * pp + p) * each
                    stage = {"first": c + p == 0, "last": c == chunks - 1 and p == pp - 1, "layers": (first, each)}
                    key = "model" if chunks == 1 else f"model{c}"
                    content[key] = OrderedDict(stage_tensors(weights, args, t, tp, e, ep, fused, **stage))
                name = f"mp_rank_{t:02d}" + f"_{p:03d}" * (pp > 1) + f"_{e:03d}" * (ep > 1)
                path = folder / "iter_0000007" / name / "model_optim_rng.pt"
                path.parent.mkdir(parents=True)
                torch.save(content, path)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder


def stage_tensors(
    weights: Weights, args: argparse.Namespace, t: int, tp: int, e: int, ep: int, fused: bool, **stage: Any
) -> Iterator[tuple[str, Any]]:
    start, count = stage["layers"]
    for name, whole in weights.items():
        layer = layer_of(name)
        if layer is None:
            here = stage["first"] if name.startswith("embedding.") else stage["last"]
        else:
            here = start <= layer < start + count
        if not here:
            continue
        renamed = name if layer is None else name.replace(f"layers.{layer}.", f"layers.{layer - start}.")
        for ours, theirs in FUSED.items() if fused else ():
            renamed = renamed.replace(ours, theirs)
        if ".experts.linear" in name:
            own = args.num_experts // ep
            for number in range(own):
                local = renamed.replace("experts.linear", f"experts.local_experts.{number}.linear")
                yield local, shard(name, whole[e * own + number], args, t, tp)
        else:
            yield renamed, shard(name, whole, args, t, tp)
    if stage["last"] and not args.untie_embeddings_and_output_weights and not stage["first"]:
        yield (
            "output_layer.weight",
            shard("output_layer.weight", weights["embedding.word_embeddings.weight"], args, t, tp),
        )
    yield f"decoder.layers.{count - 1}.mlp.linear_fc1._extra_state", io.BytesIO(b"bytes of another library")


def shard(name: str, whole: Tensor, args: argparse.Namespace, t: int, tp: int) -> Tensor:
    """A tensor-parallel rank's part."""
    if "linear_fc1." in name and args.swiglu:
        gate, value = whole.chunk(2)
        return torch.cat([gate.chunk(tp)[t], value.chunk(tp)[t]]).clone()
    if name.split(".")[-2] in ("word_embeddings", "output_layer", "linear_qkv", "linear_fc1"):
        return whole.chunk(tp)[t].clone()
    if name.endswith(("linear_proj.weight", "linear_fc2.weight")):
        return whole.chunk(tp, dim=1)[t].clone()
    return whole


class Chunked:
    """A global tensor saved in parts: per layer if it is stacked, and ``rows`` parts of the last axis but one."""

    def __init__(self, whole: Tensor, stacked: bool, rows: int) -> None:
        self.whole = whole
        self.offsets: list[tuple[int, ...]] = []
        sizes = [1 if i == 0 and stacked else n for i, n in enumerate(whole.shape)]
        axis = max(whole.dim() - 2, int(stacked))
        if whole.dim() > axis and whole.shape[axis] % rows == 0:
            sizes[axis] //= rows
        self.sizes = tuple(sizes)
        counts = [n // s for n, s in zip(whole.shape, sizes, strict=True)]
        for flat in range(int(np.prod(counts))):
            at = np.unravel_index(flat, counts)
            self.offsets.append(tuple(int(i) * s for i, s in zip(at, sizes, strict=True)))

    def sizes_at(self, offset: tuple[int, ...]) -> tuple[int, ...]:
        """The shape of the part at ``offset``."""
        return self.sizes


class Ranges(Chunked):
    """A tensor saved in ranges of its last dimension, the shorter one last; each row of the others is separate."""

    def __init__(self, whole: Tensor, length: int) -> None:
        self.whole, self.length = whole, length
        rows = np.ndindex(*whole.shape[:-1])
        self.offsets = [(*map(int, row), at) for row in rows for at in range(0, whole.shape[-1], length)]

    def sizes_at(self, offset: tuple[int, ...]) -> tuple[int, ...]:
        return (*(1 for _ in offset[1:]), min(self.length, self.whole.shape[-1] - offset[-1]))


class Planner(SavePlanner):
    """Writes ``Chunked`` tensors, and other objects unchanged."""

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        self.state = state_dict

    def create_local_plan(self) -> SavePlan:
        items = []
        for name, value in self.state.items():
            if not isinstance(value, Chunked):
                items.append(WriteItem(MetadataIndex(name), WriteItemType.BYTE_IO))
                continue
            for offset in value.offsets:
                chunk = ChunkStorageMetadata(torch.Size(offset), torch.Size(value.sizes_at(offset)))
                data = TensorWriteData(chunk, TensorProperties(value.whole.dtype), value.whole.shape)
                items.append(WriteItem(MetadataIndex(name, torch.Size(offset)), WriteItemType.SHARD, tensor_data=data))
        return SavePlan(items)

    def create_global_plan(self, all_plans: Any) -> Any:
        return create_default_global_save_plan(all_plans)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> Any:
        value = self.state[write_item.index.fqn]
        if isinstance(value, Chunked):
            start = write_item.index.offset
            sizes = value.sizes_at(tuple(start))
            return value.whole[tuple(slice(a, a + n) for a, n in zip(start, sizes, strict=True))].clone()
        buffer = io.BytesIO()
        torch.save(value, buffer)
        return buffer


def write_distributed(
    folder: Path,
    weights: Weights,
    args: argparse.Namespace,
    *,
    stacked: bool = True,
    halves: bool = False,
    extra: Mapping[str, Any] = MappingProxyType({}),
) -> Path:
    """``--ckpt-format torch_dist``: layers stacked or by number, gate and value together or as two tensors."""
    tp = args.tensor_model_parallel_size
    state: dict[str, Any] = {"common_state/shard_0_1": {"args": args, **further()}}
    by_rest: dict[str, dict[int, Tensor]] = {}
    for name, whole in weights.items():
        layer = layer_of(name)
        if layer is None:
            state[name] = Chunked(whole, False, tp)
            continue
        rest = name.split(".", 3)[3].replace("mlp.experts.linear", "mlp.experts.experts.linear")
        for ours, theirs in FUSED.items():
            rest = rest.replace(ours, theirs) if not (args.num_experts and "pre_mlp" in ours) else rest
        by_rest.setdefault(rest, {})[layer] = whole
    for rest, layers in by_rest.items():
        whole = torch.stack([layers[n] for n in sorted(layers)])
        gated = "linear_fc1.weight" in rest and args.swiglu
        named = {rest: whole}
        if halves and gated:
            named = dict(zip((rest + "_w", rest + "_v"), whole.chunk(2, dim=whole.dim() - 2), strict=True))
        for key, each in named.items():
            if stacked:
                state[f"decoder.layers.{key}"] = Chunked(each, True, 2 * tp if gated else tp)
            else:
                state |= {f"decoder.layers.{n}.{key}": Chunked(each[n], False, tp) for n in range(len(each))}
        state[f"optimizer.state.exp_avg.decoder.layers.{rest}"] = Chunked(torch.zeros(4, 2), False, 1)
    state["decoder.layers.mlp.linear_fc1._extra_state/shard_0_2"] = io.BytesIO(b"bytes of another library")
    state |= extra
    path = folder / "iter_0000007"
    save(state, storage_writer=FileSystemWriter(path), planner=Planner(), no_dist=True)
    (folder / "latest_checkpointed_iteration.txt").write_text("7")
    return folder
