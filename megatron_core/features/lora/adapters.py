"""Add low-rank adapters to the linear layers of a model, and freeze everything else."""

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from inspect import signature
from typing import Any

import torch
from torch import Tensor, nn

from megatron_core.config import RunConfig
from megatron_core.features.experts.experts import GroupedLinear
from megatron_core.features.lora.layer import LoRA
from megatron_core.features.lora.settings import PARTS, WHOLE, TuningConfig
from megatron_core.models.gpt.model import GPTModel
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.initialization import draw_by_name
from megatron_core.parallel.sharding import Range, ShardSpec, spec_of
from megatron_core.tensor_parallel import KeyedDropout
from megatron_core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron_core.transformer.context import SequenceContext
from megatron_core.transformer.down_projection import DownProjection
from megatron_core.transformer.joined import separate_parts
from megatron_core.transformer.mlp import MLP

MARK = ".adapter."
"""Occurs in the names of all parameters of adapters, and in no other name."""
Linear = ColumnParallelLinear | RowParallelLinear | DownProjection | GroupedLinear


def is_adapter(name: str) -> bool:
    """Whether a parameter's global name is that of an adapter."""
    return MARK in name


def linears_of(layers: nn.ModuleDict) -> Iterator[tuple[str, Linear]]:
    """The linear layers of attention and MLP, with their global names."""
    for number, layer in layers.items():
        for name, module in layer.named_modules():
            if isinstance(module, ColumnParallelLinear | RowParallelLinear | DownProjection | GroupedLinear):
                yield f"decoder.layers.{number}.{name}", module


def add_to_stage(config: RunConfig, model: GPTModel, groups: ParallelGroups, *, initialise: bool) -> None:
    """Freeze a stage and add low-rank adapters; see ``Feature.change_stage``."""
    tuning = config.section(TuningConfig)
    seed = config.training.seed
    layers = model.decoder.layers
    current = _CurrentSequence()
    model.requires_grad_(False)
    separate_parts(layers.values())
    for name, linear in linears_of(layers):
        assert linear.weight is not None, "linear layers inside of layers own their weight"
        spec = spec_of(linear.weight)
        is_expert = isinstance(linear, GroupedLinear)
        weight_parts = tuning.parts_of(name, fused=1 if spec.fused is None else len(spec.fused.rows))
        if not weight_parts:
            continue
        axis = "etp" if is_expert else "tp"
        linear.adapter = LoRA(
            linear.weight,
            {weight_part: rows_of_part(spec, weight_part, name) for weight_part in weight_parts},
            tuning,
            group=groups.group(axis),
            axis=axis,
            sequence_parallel=model.parallel.sequence_parallel and not is_expert,
        )
        if tuning.lora_dropout:
            linear.adapter.dropout = InputDropout(tuning.lora_dropout, seed, name, linear, current)
        for parameter_name, parameter in linear.adapter.named_parameters() if initialise else ():
            draw_by_name(f"{name}{MARK}{parameter_name}", parameter, seed)
    if tuning.lora_dropout:
        for layer in layers.values():
            current.follow(layer)


def adapters_of(module: nn.Module) -> Iterator[tuple[str, Linear, LoRA]]:
    """The linear layers below ``module`` that have an adapter, with their names."""
    for name, linear in module.named_modules():
        adapter = getattr(linear, "adapter", None)
        if isinstance(adapter, LoRA):
            yield name, linear, adapter


@contextmanager
def without_adapters(stages: Sequence[nn.Module]) -> Iterator[None]:
    """Compute with the frozen weights alone inside the context: the model before its fine-tuning."""
    adapters = [adapter for stage in stages for _, _, adapter in adapters_of(stage)]
    for adapter in adapters:
        adapter.enabled = False
    try:
        yield
    finally:
        for adapter in adapters:
            adapter.enabled = True


class _CurrentSequence(threading.local):
    """The micro-batch of the layer that this thread computes; linear layers receive only activations.

    Interleaved micro-batches and recomputation in backward have threads of their own, or call the layer again.
    """

    context: SequenceContext | None = None

    def follow(self, layer: nn.Module) -> None:
        """Note the context of each call of ``layer``, and of those of its parts that may be recomputed alone."""

        def note(_: nn.Module, args: tuple[Any, ...]) -> None:
            self.context = args[1]

        layer.register_forward_pre_hook(note)
        for module in (*layer.children(), *(module for module in layer.modules() if isinstance(module, MLP))):
            if list(signature(module.forward).parameters)[1:2] == ["context"]:
                module.register_forward_pre_hook(note)


class InputDropout(nn.Module):
    """Dropout of an adapter's inputs ``[s, b, I]``: a function of sample, position and input feature.

    All adapters of a fused weight share the mask.
    """

    def __init__(self, p: float, seed: int, name: str, linear: Linear, current: _CurrentSequence) -> None:
        super().__init__()
        assert linear.weight is not None
        spec = spec_of(linear.weight)
        self.dropout = KeyedDropout(p, seed, f"{name}.adapter")
        self.current = current
        self.splits_inputs = any(split.dim == 1 for split in spec.splits)
        global_box = spec.parts[0].whole
        self.features = global_box.start[1], global_box.stop[1]

    def forward(self, x: Tensor) -> Tensor:
        """Drop elements in training."""
        context = self.current.context
        if not self.dropout.active or context is None:
            return x
        features = torch.arange(*self.features, device=x.device)
        dropped = self.dropout(
            x.transpose(0, 1).unsqueeze(1).contiguous(),  # features as keys, which have global numbers
            context.sample_index,
            position_ids=context.positions if self.splits_inputs else context.residual_positions,
            key_positions=features,
        )
        return dropped.squeeze(1).transpose(0, 1)


def rows_of_part(spec: ShardSpec, weight_part: str, name: str) -> tuple[Range, ...]:
    """The global rows of a part of a weight."""
    rows = spec.global_shape[-2]
    if weight_part == WHOLE or spec.fused is None:
        return ((0, rows),)
    sizes = spec.fused.rows
    first, end = PARTS[name.rpartition(".")[2], len(sizes)][weight_part]
    start, stop = sum(sizes[:first]), sum(sizes[:end])
    return tuple((block + start, block + stop) for block in range(0, rows, sum(sizes)))
