"""Preparation of a whole model on this rank: groups, equal weights, dtype, and units of data parallelism."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from megatron_core.any_model.activations import save_memory
from megatron_core.any_model.context import ContextParallel
from megatron_core.any_model.context_attention import decoder_parts
from megatron_core.any_model.experts import split_experts
from megatron_core.any_model.fp8 import histories_of, multiply_in_fp8
from megatron_core.any_model.gated_experts import connect_experts, expert_parameters
from megatron_core.any_model.module import (
    Initialise,
    LocalInitialisation,
    UnitClasses,
    broadcast_from_first,
    cast_module,
    check_same_module,
    find_units,
)
from megatron_core.any_model.optimizer import Groups, groups_of
from megatron_core.any_model.tensor import split_model
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.features.compilation.graphs import compile_forward
from megatron_core.features.compilation.settings import CompilationConfig
from megatron_core.features.fp8.amax_history import AmaxHistories
from megatron_core.parallel.configured import make_groups
from megatron_core.parallel.groups import ParallelGroups
from megatron_core.parallel.texts import raising_on_all_ranks
from megatron_core.parallel.world import World


@dataclass(frozen=True)
class Choices:
    """Arguments of ``initialize`` about the parameters of a model."""

    model_parameters: list[Any] | None
    """Parameters, or groups of them."""
    unit_classes: UnitClasses | None
    initialise: Initialise | None
    keeps_all: bool
    """Whether parameter groups keep settings of the caller's own optimizer."""
    trains: bool = True
    """Whether the engine must have trained parameters."""


@dataclass(frozen=True)
class Prepared:
    """A model on this rank, before its gradients get buckets."""

    groups: ParallelGroups
    stages: dict[int, nn.Module]
    """This rank's stages by number; without a pipeline the model is stage 0."""
    units: dict[int, list[list[nn.Module]]]
    """Modules of the units of data parallelism of each stage."""
    param_groups: Groups
    initialisation: LocalInitialisation
    fp8: AmaxHistories | None = None
    context: ContextParallel | None = None


def compile_units(units: Iterable[Iterable[nn.Module]], settings: CompilationConfig) -> None:
    """Compile the forward of each unit, if configured; operations that torch cannot trace divide its graph."""
    for unit in (unit for modules in units for unit in modules if settings.compile):
        compile_forward(unit, fullgraph=False, backend=settings.compile_backend)


def equalize_and_split(model: nn.Module, groups: ParallelGroups, seed: int, device: torch.device) -> None:
    """Make the weights equal on all ranks, and split them unless ``parallelize`` has done both."""
    size = groups.size("tp")
    known = getattr(model, "tensor_parallel_size", 1)
    if known not in (1, size):
        raise ConfigError(
            f"tensor_model_parallel_size={size}, but the model was given to parallelize(tensor={known}); use one value"
        )
    experts = groups.size("ep")
    known_experts = getattr(model, "expert_parallel_size", 1)
    if known_experts not in (1, experts):
        raise ConfigError(
            f"expert_model_parallel_size={experts}, but the model was given to parallelize(expert={known_experts}); "
            "use one value"
        )
    if known_experts > 1 and size > known:
        raise ConfigError(
            f"tensor_model_parallel_size={size}, but parallelize has split only the experts of the model; give it "
            f"tensor={size}, too"
        )
    # Layers ``MoE`` have been constructed with this rank's experts, which other ranks do not have.
    local = expert_parameters(model)
    if known == 1 and known_experts == 1:
        broadcast_from_first([*(p for p in model.parameters() if p not in local), *model.buffers()])
    if size > known:
        split_model(model, groups.group("tp"))
    if local:
        connect_experts(model, groups)
    elif experts > known_experts:
        split_experts(model, groups, device)
    if size > 1 or groups.size("cp") > 1:
        # Dropout outside of split layers is equal on the ranks of a tensor-parallel group, and not on others.
        torch.manual_seed(seed + groups.index("dp") * groups.size("cp") + groups.index("cp"))


def prepare_model(module: nn.Module, config: RunConfig, world: World, choices: Choices) -> Prepared:
    """Create the groups, and make the model equal on all ranks, in the dtype of the run."""
    groups = make_groups(config.parallel, world, ends=(0, 0))
    check_same_module(module, world.device)
    with raising_on_all_ranks(world.device):
        param_groups = groups_of(
            module, config.optimizer, choices.model_parameters, keeps_all=choices.keeps_all, trains=choices.trains
        )
    cast_module(module, config, world.device)
    local = LocalInitialisation(module, config.training.seed, world.device, choices.initialise)
    equalize_and_split(module, groups, config.training.seed, world.device)
    context = ContextParallel(module, config, groups) if groups.size("cp") > 1 else None
    multiply_in_fp8(module, find_units(module, choices.unit_classes), config, groups, world.device)
    units = find_units(module, choices.unit_classes)
    compile_units(units, config.section(CompilationConfig))
    save_memory(module, [child for modules in units for child in modules], config.model)
    if choices.unit_classes is None and config.parallel.dp_zero_stage == 3:
        # A rank whose micro-batch has no images does not run a tower; outside of units all ranks gather their weights.
        always_run = decoder_parts(module)
        units = [modules for modules in units if always_run.issuperset(modules)]
    histories = histories_of(module, config, groups, world.device)
    return Prepared(groups, {0: module}, {0: units}, param_groups, local, histories, context)
