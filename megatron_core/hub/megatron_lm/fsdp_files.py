"""The format ``fsdp_dtensor`` of Megatron-FSDP: a state dict of DTensors in files of ``torch.distributed.checkpoint``.

Keys are paths in the state dict, such as ``model.module.decoder.layers.0.mlp.linear_fc1.weight_w`` and
``optimizer.state.module.module.module.NAME.exp_avg``. Layers and experts have global numbers; the two halves of gated
layers are tensors of their own (``_w``, ``_v``). Source: ``preprocess_fsdp_dtensor_state_dict`` of Megatron-LM.
"""

import re
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from torch import Tensor

from megatron_core.config import ModelConfig
from megatron_core.errors import CheckpointError, quoted
from megatron_core.hub.megatron_lm.distributed_files import DistributedFiles, without_copies
from megatron_core.hub.megatron_lm.pickles import load_metadata
from megatron_core.hub.megatron_lm.tensor_map import (
    EXPERT,
    LAYER,
    MODEL,
    Sizes,
    TensorPart,
    TensorParts,
    in_our_order,
    plain_name,
    with_mixers,
)
from megatron_core.parallel.boxes import Box
from megatron_core.text_file import parse_json, read_text

WRAPPERS = re.compile(r"(?:module\.)*")
"""The modules that wrap the model: Megatron-FSDP, and Float16Module in 16 bits."""
STATE = re.compile(r"optimizer\.(?:\d+\.)?state\.(.+)\.(exp_avg|exp_avg_sq)")
STEP = re.compile(r"optimizer\.(?:.+\.)?step")
BACKEND = ("torch_dist", 1)
"""Format and version of the files that are read."""
SCALE = "optimizer.grad_scaler."
SCHEDULE = "opt_param_scheduler."


class FSDPFiles(DistributedFiles):
    """The tensors and objects in a folder of the format ``fsdp_dtensor``."""

    def _content(self) -> Any:
        objects = {name: self._object(name) for name in ("args", "iteration") if name in self._entries}
        return objects | {"opt_param_scheduler": self._below(SCHEDULE)}

    def parts(self, model: ModelConfig) -> TensorParts:
        """All stored parts of our weights by name."""
        weights: TensorParts = {}
        for stored in self._entries:
            name = WRAPPERS.sub("", stored.removeprefix("model."), count=1)
            if stored.startswith("model.") and name.startswith(MODEL):
                self._add_parts(weights, stored, name)
        return self._ours(weights, model)

    def optimizer_parts(self, model: ModelConfig) -> dict[str, TensorParts]:
        """The parts of each kind of Adam's state; the main weights are the stored weights."""
        states: dict[str, TensorParts] = {}
        for stored in self._entries:
            if (match := STATE.fullmatch(stored)) is not None:
                self._add_parts(states.setdefault(match[2], {}), stored, WRAPPERS.sub("", match[1], count=1))
        return {state_kind: self._ours(tensor_parts, model) for state_kind, tensor_parts in states.items()}

    def _ours(self, tensor_parts: TensorParts, model: ModelConfig) -> TensorParts:
        """The parts under our names. Projections of Mamba-2 mixers are stored as the ranks have them, those of delta
        nets in pieces."""
        ordered = in_our_order(without_copies(tensor_parts, model), model, Sizes.of(self.arguments).tp)
        return with_mixers(ordered, model)

    def optimizer_counts(self) -> Any:
        """Adam's step, which all parameters share, and the loss scale."""
        name = next((name for name in self._entries if STEP.fullmatch(name)), None)
        groups = [] if name is None else [{"step": self._value(name)}]
        return {"param_groups": groups, "grad_scaler": self._below(SCALE)}

    def _below(self, prefix: str) -> dict[str, Any]:
        return {name.removeprefix(prefix): self._value(name) for name in self._entries if name.startswith(prefix)}

    def _value(self, name: str) -> Any:
        """An object, or a tensor of one element."""
        chunks = getattr(self._entries[name], "chunks", None)
        if chunks is None:
            return self._object(name)
        if not chunks:
            raise CheckpointError(f"{self.folder}: its metadata lists no part of {name}; copy the whole checkpoint")
        return self._chunk(name, tuple(chunks[0].offsets))

    def _add_parts(self, weights: TensorParts, stored: str, name: str) -> None:
        """Add the parts of the tensor ``stored``, which belongs to the weight ``name`` of Megatron-LM's model."""
        size = tuple(getattr(self._entries[stored], "size", ()))
        if not size or "_extra_state" in name:
            return
        shift = 0
        if "linear_fc1." in name and name.endswith(("_w", "_v")):
            shift = size[0] * name.endswith("_v")
            name = name[:-2]
        layer = LAYER.fullmatch(name)
        expert = None
        if layer is not None:
            expert, local_name = _expert(layer[3])
            name = f"{layer[1]}.layers.{layer[2]}.{plain_name(local_name)}"
        weights.setdefault(name, []).extend(self._shifted(stored, size, shift, expert))

    def _shifted(self, stored: str, size: tuple[int, ...], shift: int, expert: int | None) -> Iterator[TensorPart]:
        """The chunks of a tensor that are not empty, with their rows shifted, as the matrices of ``expert``."""
        for block in self._blocks(stored, size):
            if not block.box.numel:
                continue
            box = block.box.shifted((shift, *(0 for _ in size[1:])))
            read = block.read
            if expert is not None:
                box = Box((expert, *box.start), (expert + 1, *box.stop))
                read = partial(_stacked, read)
            yield TensorPart(box, read)


def _expert(local_name: str) -> tuple[int | None, str]:
    """The number of an expert and our name of the tensor of all experts, from a name inside a layer."""
    prefix, dot, inner = local_name.rpartition("mlp.experts.")
    match = EXPERT.fullmatch(dot + inner)
    if match is None:
        return None, local_name
    return int(match[1] or match[4]), prefix + dot + str(match[2] or match[3])


def _stacked(read: Any) -> Tensor:
    values: Tensor = read()
    return values[None]


def open_distributed(folder: Path) -> DistributedFiles:
    """Open a folder with ``.metadata``, of the format ``torch_dist`` or ``fsdp_dtensor``."""
    _check_backend(folder / "metadata.json")
    metadata = load_metadata(folder / ".metadata")
    is_state_dict = "args" in metadata.state_dict_metadata and not (folder / "common.pt").is_file()
    return FSDPFiles(folder, metadata) if is_state_dict else DistributedFiles(folder, metadata)


def _check_backend(path: Path) -> None:
    """``CheckpointError`` if the file, which Megatron Core writes last, names another or a newer format."""
    if not path.exists():
        return
    try:
        content = parse_json(read_text(path))
        backend = content["sharded_backend"], content.get("sharded_backend_version", 1)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path} cannot be read: {error}; copy the whole checkpoint again") from None
    if backend != BACKEND:
        name, version = map(quoted, backend)
        raise CheckpointError(
            f"{path} names the format {name} of version {version}; {BACKEND[0]} of version {BACKEND[1]} is read. Load "
            "and save it with a release of Megatron Core that writes this version"
        )
