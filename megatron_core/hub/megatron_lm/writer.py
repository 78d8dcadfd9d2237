"""Write a checkpoint in the format ``torch_dist`` of Megatron Core, or as plain tensors of PyTorch's ``torch_dcp``.

Both are folders of ``torch.distributed.checkpoint``: each rank writes the tensors of a share of the boxes to one file,
and rank 0 the file ``.metadata``, which names each box. A box may have several names, which share its bytes.
"""

import io
import json
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch

from megatron_core.checkpoint import CheckpointReader
from megatron_core.checkpoint.folder import (
    DISTRIBUTED_STATE,
    is_own_distributed,
    is_replaceable,
    iteration_folder,
    replace_file,
)
from megatron_core.checkpoint.hashes import sync_folder, write_file
from megatron_core.checkpoint.manifest import TORCH_DTYPES
from megatron_core.checkpoint.removal import delete_hidden, give_name
from megatron_core.config import ModelConfig
from megatron_core.config.layer_settings import LayerBlock
from megatron_core.errors import CheckpointError
from megatron_core.features.experts.settings import MoEConfig
from megatron_core.features.latent_attention.settings import LatentAttentionConfig
from megatron_core.features.layer_sizes.settings import HeterogeneousConfig
from megatron_core.features.recurrent.settings import RecurrentConfig
from megatron_core.hub.megatron_lm.arguments import common_state
from megatron_core.hub.megatron_lm.reader import TRACKER
from megatron_core.hub.megatron_lm.tensor_map import FROZEN, LAYER, norm_offset, pieces_of_mixer, rows_of_ranks
from megatron_core.hub.rules import unlike_megatron
from megatron_core.parallel.boxes import Box

Format = Literal["torch_dist", "torch_dcp"]
STATES = {"exp_avg": ("exp_avg",), "exp_avg_sq": ("exp_avg_sq",), "main": ("fp32_param", "param")}
"""Our kinds of optimizer state -> their names with and without Megatron Core's distributed optimizer."""
EXTRA = re.compile(
    r"(?!optimizer\.)(.+\.(?:linear_\w+|(?:eh|in|out|fc\d_latent)_proj|\w*norm|self_attention|mlp))\.weight(?:\.dt|\.alpha)?"
)
"""Weights of modules with an extra state; a mixer's projection is stored in pieces, of which dt or alpha is one."""
Record = tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...], str, str, int, int]
"""Name, global shape, offset and shape of a box, its dtype, and the file, position and length of its bytes."""


def layer_names(local_name: str, model: ModelConfig, *, of_experts: bool) -> tuple[str, ...]:
    """The names of a tensor of a layer in Megatron Core: with Transformer Engine, then without it if they differ."""
    module, _, suffix = local_name.rpartition(".")
    latent = model.section(LatentAttentionConfig).multi_latent_attention
    if module == "input_layernorm" and not latent:
        return (f"self_attention.linear_qkv.layer_norm_{suffix}",)
    fused = {
        "pre_mlp_layernorm": "mlp.linear_fc1.layer_norm_",
        "self_attention.q_layernorm": "self_attention.linear_q_up_proj.layer_norm_",
        "self_attention.kv_layernorm": "self_attention.linear_kv_up_proj.layer_norm_",
    }
    if module == "pre_mlp_layernorm":
        names = (local_name,) if of_experts else (fused[module] + suffix,)
        other = (fused[module] + suffix,) if of_experts else (local_name,)
        return names + (other if of_experts != latent else ())
    if module in fused and latent:
        return fused[module] + suffix, local_name
    return (local_name.replace("mlp.experts.", "mlp.experts.experts."),)


def megatron_names(name: str, model: ModelConfig) -> Iterator[tuple[str, int | None]]:
    """The names of our weight ``name`` in Megatron Core, and the layer if layers are stacked under the name."""
    model = model.section(RecurrentConfig)
    layer = LAYER.fullmatch(name)
    if layer is None:
        yield name, None
        return
    number = int(layer[2])
    inner = "mtp_model_layer."
    local_name = layer[3].removeprefix(inner)
    prefix = "transformer_layer." if layer[3].startswith(inner) else ""
    if prefix and model.hybrid_layer_pattern is not None:
        layer_part = int("mlp" in local_name.partition(".")[0])
        prefix = f"{inner}layers.{layer_part}."
    experts = model.section(MoEConfig)
    of_experts = (number if layer[1] == "decoder" else model.num_layers) in experts.expert_layers
    stacked = (
        model.hybrid_layer_pattern is None
        and not model.section(HeterogeneousConfig).blocks
        and layer[1] == "decoder"
        and not rows_of_ranks(model)
        and (experts.num_experts is None or experts.moe_layer_freq == (1,))
    )
    every = layer_names(local_name, model, of_experts=of_experts)
    if model.layers_differ_in_size and "layernorm." in local_name:
        every = _norm_names(local_name, model.block_of(number)) or every
    for theirs in every if model.hybrid_layer_pattern is None else every[:1]:  # hybrid models have one form
        if stacked:
            yield f"decoder.layers.{theirs}", number
        else:
            yield f"{layer[1]}.layers.{number}.{prefix}{theirs}", None


def _norm_names(name: str, block: LayerBlock) -> tuple[str, ...]:
    """The names of a norm before a part with a size of its own, or a linear layer; () for other norms.

    Without Transformer Engine, Megatron Core has another name for the norm before a part of the model's size.
    """
    module, _, suffix = name.rpartition(".")
    norms = {
        "input_layernorm": (block.attention, "self_attention", "linear_qkv"),
        "pre_mlp_layernorm": (block.mlp, "mlp", "linear_fc1"),
    }
    if module not in norms:
        return ()
    sizes, owner, first = norms[module]
    if sizes.linear:
        return (f"{owner}.layer_norm_{suffix}",)
    return (f"{owner}.{first}.layer_norm_{suffix}", *((name,) if sizes.size is None else ()))


def _records(
    name: str, shape: tuple[int, ...], box: Box, model: ModelConfig, form: Format, kinds: Collection[str]
) -> Iterator[tuple[str, tuple[int, ...], tuple[int, ...], tuple[int, ...]]]:
    """Name, global shape, offset and shape of a box of the tensor ``name`` under each of its names."""
    if form == "torch_dcp":
        yield name, shape, box.start, box.shape
        return
    state_kind, weight = ("model", name[6:]) if name.startswith("model.") else name.split(".", 2)[1:]
    prefixes = (
        [""]
        if state_kind == "model"
        else [f"optimizer.state.{state_name}." for state_name in STATES.get(state_kind, ())]
    )
    if state_kind == "model" and kinds and "main" not in kinds and not weight.endswith(FROZEN):
        prefixes += [
            f"optimizer.state.{state_name}." for state_name in STATES["main"]
        ]  # float32 weights are the main weights
    for theirs, layer in megatron_names(weight, model):
        lead = () if layer is None else (layer,)
        sizes = (model.num_layers,) * len(lead)
        for prefix in prefixes:
            yield prefix + theirs, (*sizes, *shape), (*lead, *box.start), (*(1 for _ in lead), *box.shape)


def write_checkpoint(
    reader: CheckpointReader,
    model: ModelConfig,
    save: Path,
    form: Format,
    *,
    rank: int = 0,
    ranks: int = 1,
    exchange: Callable[[str], list[str]] = lambda text: [text],
) -> Path:
    """Write the checkpoint of ``reader`` into ``save`` as ``form``; returns its folder. All ranks call it together.

    ``exchange`` returns the texts of all ranks. The folder appears complete, by one rename; then the file that names
    the latest iteration is replaced. Errors: ``CheckpointError`` on all ranks.
    """
    for reason in unlike_megatron(model) if form == "torch_dist" else ():
        raise CheckpointError(f"the model cannot be written as torch_dist: {reason}; use torch_dcp or hf")
    iteration = int(reader.state["iteration"])
    final = iteration_folder(save, iteration)
    partial = final.with_name(f".{final.name}.incomplete")
    problem = ""
    records = list[Any]()
    if rank == 0:
        problem = _attempt(final, lambda: _prepare(final, partial))
    _raise(exchange(problem))
    problem = _attempt(final, lambda: records.extend(_write_share(reader, model, partial, form, rank, ranks)))
    texts = exchange(json.dumps([problem, records]))
    _raise([json.loads(text)[0] for text in texts])
    if rank == 0:
        everything = [record for text in texts for record in json.loads(text)[1]]
        problem = _attempt(final, lambda: _complete(reader, partial, final, form, everything))
    _raise(exchange(problem))
    return final


def _prepare(final: Path, partial: Path) -> None:
    if os.path.lexists(final) and not is_replaceable(final, is_own_distributed):
        raise CheckpointError(f"{final} exists and was not written by this program; choose another folder")
    delete_hidden(partial)
    partial.mkdir(parents=True)


def _write_share(
    reader: CheckpointReader, model: ModelConfig, folder: Path, form: Format, rank: int, ranks: int
) -> list[Record]:
    """Write every box whose number is this rank's, modulo ``ranks``."""
    records: list[Record] = []
    kinds = [state_kind for state_kind in reader.kinds if state_kind in STATES] if _has_adam(reader) else []
    prefixes = ("model.", *(f"optimizer.{state_kind}." for state_kind in kinds))
    stored = reader.manifest.tensors.items()
    tensors = {name: tensor for name, tensor in stored if form == "torch_dcp" or name.startswith(prefixes)}
    file_name = f"__{rank}_0.distcp"
    number = 0
    position = 0
    with (folder / file_name).open("wb") as file:
        for name, tensor in tensors.items():
            is_mine = [(number + i) % ranks == rank for i in range(len(tensor.boxes))]
            number += len(tensor.boxes)
            for (box, values), mine in zip(reader.boxes(name) if any(is_mine) else (), is_mine, strict=False):
                if not mine:
                    continue
                unsplit = [(name, tensor.shape, box, box)]
                is_weight = form == "torch_dist" and name.startswith(("model.", "optimizer.main."))
                offset = norm_offset(name, model) if is_weight else 0.0
                for theirs, size, target, piece in (
                    pieces_of_mixer(name, tensor.shape, box, model) if form == "torch_dist" else unsplit
                ):
                    named = list(_records(theirs, size, target, model, form, kinds))
                    shape = named[0][3] if named else piece.shape  # the same under each name
                    data = _bytes(values[piece.within(box)].reshape(shape) - offset)
                    file.write(data)
                    records += [(*named_box, tensor.dtype, file_name, position, len(data)) for named_box in named]
                    position += len(data)
    return records


def _complete(reader: CheckpointReader, partial: Path, final: Path, form: Format, records: list[list[Any]]) -> None:
    """Write the state and the metadata, give the folder its name and record the iteration."""
    from torch.distributed import checkpoint as dcp  # imported here: it takes 1.1 s, which other programs save

    entries: dict[str, Any] = {}
    storage: list[Any] = []
    paths: dict[str, tuple[str, ...]] = {}
    for name, size, offset, shape, dtype, file, position, length in records:
        properties = dcp.metadata.TensorProperties(TORCH_DTYPES[dtype])
        entry = entries.setdefault(name, dcp.metadata.TensorStorageMetadata(properties, torch.Size(size), []))
        index = dcp.metadata.MetadataIndex(name, torch.Size(offset), len(entry.chunks))
        entry.chunks.append(dcp.metadata.ChunkStorageMetadata(torch.Size(offset), torch.Size(shape)))
        storage.append(dcp.storage.WriteResult(index, length, dcp.filesystem._StorageInfo(file, position, length)))
        paths[name] = tuple(name.split(".", 2 if name.startswith("optimizer.") else 1))
    if form == "torch_dist":
        common = common_state(reader.state, has_adam=_has_adam(reader))
        hybrid = reader.state["config"].get("hybrid_layer_pattern") is not None
        objects: dict[str, Any] = {name: [None] for name in _empty_states(entries, hybrid=hybrid)}
        objects["common_state/shard_0_1"] = [common]
    else:
        objects = {"state": _plain(reader)}
    file = DISTRIBUTED_STATE
    written = b""
    for name, value in objects.items():
        data = _bytes(value)
        entries[name] = dcp.metadata.BytesStorageMetadata()
        location = dcp.filesystem._StorageInfo(file, len(written), len(data))
        storage.append(dcp.storage.WriteResult(dcp.metadata.MetadataIndex(name), len(data), location))
        paths[name] = (name,)
        written += data
    write_file(partial / file, written)
    planner = paths if form == "torch_dcp" else None
    dcp.FileSystemWriter(partial).finish(dcp.metadata.Metadata(entries, planner), [storage])
    if form == "torch_dist":
        backend = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}
        write_file(partial / "metadata.json", json.dumps(backend).encode())
    sync_folder(partial)
    before = give_name(partial, final, is_own_distributed)
    iteration = str(reader.state["iteration"]).encode()
    replace_file(final.parent / TRACKER, final.parent / f".{TRACKER}", iteration)
    delete_hidden(before)


def _empty_states(entries: Mapping[str, Any], *, hybrid: bool) -> Iterator[str]:
    """The names of Megatron Core's extra states of linear layers, norms and attention, which are empty without FP8.

    Each has a number of the layer and of the expert where the weights are stacked over these. That of the output layer
    is loaded by hybrid models only.
    """
    if hybrid:
        yield "output_layer._extra_state/shard_0_1"
    for name, entry in entries.items():
        match = EXTRA.fullmatch(name)
        if match is None:
            continue
        module = match[1]
        sizes = tuple(entry.size)[: len(entry.size) - (1 if module.endswith("norm") else 2)] or (1,)
        modules = [module]
        if module.endswith("self_attention.linear_proj"):
            modules.append(module.replace("linear_proj", "core_attention"))
        for indices in product(*map(range, sizes)):
            label = f"shard_{'.'.join(map(str, indices))}_{'.'.join(map(str, sizes))}"
            yield from (f"{module_name}._extra_state/{label}" for module_name in modules)


def _has_adam(reader: CheckpointReader) -> bool:
    """Whether the state of Adam is written: that of other optimizers is not."""
    return reader.state["config"].get("optimizer") == "adam" and {"exp_avg", "exp_avg_sq"} <= set(reader.kinds)


def _plain(reader: CheckpointReader) -> dict[str, Any]:
    """The state of the run without nested records."""
    return {name: value for name, value in reader.state.items() if isinstance(value, int | float | str | dict | None)}


def _bytes(value: object) -> bytes:
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _attempt(final: Path, action: Callable[[], object]) -> str:
    """Run ``action``; returns the error, or ""."""
    try:
        action()
    except (OSError, CheckpointError) as error:
        return f"{final} cannot be written: {error}"
    return ""


def _raise(problems: list[str]) -> None:
    if problem := next(filter(None, problems), ""):
        raise CheckpointError(problem)
