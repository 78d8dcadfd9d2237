"""Weights that an export reads: low-rank adapters merged with the frozen weights, averages, adapters for PEFT."""

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from copy import deepcopy
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_core.checkpoint import CheckpointReader, TensorBox, open_newest, parameter_pieces
from megatron_core.config import RunConfig
from megatron_core.config.optimizers import AVERAGE
from megatron_core.errors import CheckpointError
from megatron_core.features.lora.adapters import linears_of
from megatron_core.features.lora.settings import TuningConfig
from megatron_core.hub.hugging_face.peft import peft_names, write_adapter
from megatron_core.hub.hugging_face.writer import read_whole
from megatron_core.hub.logits import compare_logits
from megatron_core.models.build import meta_model
from megatron_core.parallel.boxes import Box
from megatron_core.prepared_output import new_folder
from megatron_core.training.compatibility import stored_config
from megatron_core.training.initial_weights import open_base


class MergedReader(AbstractContextManager["MergedReader"]):
    """The weights of adapters in ``stored``, merged with the frozen ones in ``base``, with the interface of a
    checkpoint."""

    def __init__(self, stored: Any, base: Any, config: RunConfig) -> None:
        self._stored = stored
        self._base = base
        self.state = stored.state
        model = meta_model(config, self.state["vocab_size"])
        self._linears = {n: linear for n, linear in linears_of(model.decoder.layers) if linear.adapter is not None}

    def __exit__(self, *error: object) -> None:
        self._base.__exit__(*error)
        self._stored.__exit__(*error)

    def dtype_of(self, name: str) -> torch.dtype:
        """The dtype of a frozen weight."""
        return self._base.dtype_of(name)

    @torch.no_grad()
    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy merged values into the memory of each box."""
        for piece in pieces:
            layer = piece.name.removeprefix("model.").removesuffix(".weight")
            if layer not in self._linears:
                # Other weights that a run with adapters has trained, such as a value head.
                in_checkpoint = isinstance(self._stored, CheckpointReader) and self._stored.has(piece.name)
                (self._stored if in_checkpoint else self._base).fill([piece])
                continue
            merged = self._merged(layer)
            origin = Box((0,) * merged.dim(), tuple(merged.shape))
            piece.memory.copy_(merged[piece.box.within(origin)])

    def _merged(self, layer: str) -> Tensor:
        """The merged weight of a layer."""
        # At least in float32, because products of bfloat16 adapters would lose most of a small change of the weight.
        wide = torch.promote_types(self._base.dtype_of(f"model.{layer}.weight"), torch.float32)
        described = self._linears[layer]
        # Process groups cannot be copied.
        shared = (
            value for module in described.modules() for value in vars(module).values() if not isinstance(value, dict)
        )
        linear = deepcopy(described, {id(value): value for value in shared}).to_empty(device="cpu").to(wide)
        adapter = linear.adapter
        weight = linear.weight
        assert adapter is not None and weight is not None
        self._base.fill(parameter_pieces([(f"{layer}.weight", weight)]))
        self._stored.fill(parameter_pieces((f"{layer}.adapter.{n}", p) for n, p in adapter.named_parameters()))
        return adapter.merged(weight)


def opened_merged(stored: CheckpointReader, config: RunConfig) -> MergedReader:
    """Open the frozen weights of a checkpoint of adapters; ``CheckpointError`` if they are in no folder."""
    base = open_base(config, torch.device("cpu"))
    if base is None:
        raise CheckpointError(
            f"{stored.folder} has adapters of weights that were drawn by the seed; only adapters of a model in "
            "--load-hf or --pretrained-checkpoint can be merged"
        )
    return MergedReader(stored, base, config)


def export_adapter(load: Path, folder: Path, *, step: int | None = None, verify: bool = True) -> float | None:
    """Write the adapters of the checkpoint in ``load`` into ``folder`` in PEFT's format.

    With ``verify``, if the frozen weights are those of a Hugging Face folder, nothing is written unless `peft` computes
    the logits of the merged model. Returns the result of ``compare_logits``, or None.
    """
    stored = open_newest(str(load), step, device=torch.device("cpu"))
    if stored is None:
        raise CheckpointError(f"{load} has no checkpoint; give a folder written by --save")
    config = stored_config(stored.folder)
    tuning = config.section(TuningConfig)
    if tuning.lora_rank is None:
        raise CheckpointError(f"{stored.folder} has no adapters; export its weights with --to hf")
    if config.optional("value_head"):
        raise CheckpointError(f"{stored.folder} has value_head=True, which --to peft does not write; use --to hf")
    base = config.checkpoint.load_hf
    if verify and base is not None and not Path(base).is_dir():
        raise CheckpointError(
            f"load_hf={base!r} of {stored.folder} does not exist, and verifying needs its frozen weights; restore it, "
            "or convert with --no-verify"
        )
    with stored as reader:
        names, shapes = peft_names(config, reader.state["vocab_size"])
        tensors = _whole(reader, shapes)
        with new_folder(f"--save {folder}", folder, load) as incomplete:
            write_adapter(incomplete, names, tensors, tuning, base)
            if not verify or base is None:
                return None
            # Not rounded to the dtype of the frozen weights, which peft adds the products of adapters to.
            open_merged = partial(opened_merged, CheckpointReader(stored.folder), config)
            merged = config.with_section(TuningConfig())
            return compare_logits(open_merged, merged, Path(base), torch.float32, adapter=incomplete)


def _whole(reader: CheckpointReader, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    tensors = {}
    for name, shape in shapes.items():
        wide = torch.promote_types(reader.dtype_of(f"model.{name}"), torch.float32)
        tensors[name] = read_whole(reader, f"model.{name}", shape, wide)
    return tensors


PREFIX = f"optimizer.{AVERAGE.name}."


class AveragedReader(CheckpointReader):
    """A checkpoint whose averages are read in place of its weights; tensors without one are read as they are."""

    def fill(self, pieces: Iterable[TensorBox]) -> None:
        """Copy the averages into the memory of every piece of a weight."""
        super().fill(self._average_of(piece) for piece in pieces)

    def _average_of(self, piece: TensorBox) -> TensorBox:
        name = PREFIX + piece.name.removeprefix("model.")
        return replace(piece, name=name) if name in self.manifest.tensors else piece
