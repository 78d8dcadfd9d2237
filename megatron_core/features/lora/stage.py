"""Adapters of a stage of the model."""

from __future__ import annotations

from megatron_core.config import RunConfig
from megatron_core.models.gpt.model import GPTModel
from megatron_core.parallel import ParallelGroups
from megatron_core.parallel.initialization import draw_by_name
from megatron_core.transformer.adapters import add_adapters, is_adapter


def add_to_stage(config: RunConfig, model: GPTModel, groups: ParallelGroups, *, initialise: bool) -> None:
    """Freeze a stage and add low-rank adapters; see ``Feature.change_stage``."""
    model.requires_grad_(False)
    seed, sequence_parallel = config.training.seed, model.parallel.sequence_parallel
    add_adapters(model.decoder.layers, config.tuning, groups, seed, sequence_parallel=sequence_parallel)
    for name, parameter in model.named_global_parameters() if initialise else ():
        if is_adapter(name):
            draw_by_name(name, parameter, seed)
