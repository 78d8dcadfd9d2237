"""``megatron_core.initialize``: an engine, its optimizer, loader and scheduler from a model and settings."""

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from megatron_core.any_model.arguments import (
    DEFAULT_PARTITION,
    check_cut,
    check_dataset,
    check_flags,
    check_functions,
    check_model,
    check_positive,
    check_unit_classes,
    checked_groups,
    make_optimizer,
)
from megatron_core.any_model.data import EngineLoader
from megatron_core.any_model.direct import detach_engine
from megatron_core.any_model.dtype import sets_dtype, with_dtype_of
from megatron_core.any_model.engine import Engine
from megatron_core.any_model.experts import split_experts
from megatron_core.any_model.layers import PipelineModule
from megatron_core.any_model.module import (
    Initialise,
    UnitClasses,
    broadcast_from_first,
    check_engine_settings,
    check_same_module,
    check_same_settings,
    read_engine_settings,
)
from megatron_core.any_model.optimizer import EngineOptimizer, settings_from, settings_of_class
from megatron_core.any_model.pipeline import PipelineEngine
from megatron_core.any_model.tensor import check_tensor_plan, split_model
from megatron_core.any_model.tensor_heads import Heads, check_heads
from megatron_core.any_model.tensor_plan import Plan, check_plan_type
from megatron_core.config import RunConfig
from megatron_core.errors import ConfigError
from megatron_core.launcher import read_integer
from megatron_core.parallel.compiled import is_compiled
from megatron_core.parallel.configured import make_groups
from megatron_core.parallel.launch import start_world
from megatron_core.parallel.world import World
from megatron_core.training.process import set_process_switches


class Initialized(NamedTuple):
    """The result of ``initialize``, in DeepSpeed's order."""

    engine: Engine
    optimizer: EngineOptimizer
    loader: EngineLoader | None
    scheduler: Any


def initialize(
    model: nn.Module,
    config: Mapping[str, Any] | str | os.PathLike[str] | RunConfig | None = None,
    optimizer: torch.optim.Optimizer | Callable[..., torch.optim.Optimizer] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    *,
    model_parameters: Iterable[Any] | None = None,
    unit_classes: UnitClasses | None = None,
    initialise: Initialise | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    shuffle: bool = True,
    partition_method: str | Sequence[int] = DEFAULT_PARTITION,
    head_modules: Sequence[str] = (),
    trains: bool = True,
) -> Initialized:
    """Prepare ``model`` for training on all ranks of the job; return (engine, optimizer, loader, scheduler).

    ``config``: settings by name, a YAML or JSON file, or a ``RunConfig``; the names are those of the command line
    (``zero_stage``, ``bf16``, ``micro_batch_size``, ``global_batch_size``, ``lr``, ...). ``optimizer``: a torch
    optimizer, or a function that makes one of a list of parameters; by default ``config`` chooses. AdamW, Adam and SGD
    run fused on shards; others run themselves, see ``needs_whole_parameters``. ``training_data``: a map-style data set;
    ``loader`` then yields this rank's micro-batches. ``lr_scheduler``: a torch scheduler of ``optimizer``, or a
    function that makes one of the engine's optimizer; each step calls its ``step()``. ``model_parameters``: parameter
    groups, if ``optimizer`` is not given. ``unit_classes``: see ``find_units``. ``partition_method`` and
    ``head_modules``: how ``pipeline_model_parallel_size`` cuts a model into stages, see ``ModelCut``; a
    ``PipelineModule`` has its own. ``initialise(module)`` fills the parameters of one module of a model on the meta
    device. ``trains=False``: only forward, also of a frozen model. Without a dtype in ``config`` that of the parameters
    is used. Without torch.distributed, torchrun's processes are joined; one process needs no launcher.

    Errors: ``ConfigError`` and ``LayoutError`` on all ranks before training begins.
    """
    settings = read_engine_settings(config)
    is_list = isinstance(model, PipelineModule)
    check_model(model)
    check_functions(lr_scheduler=None if hasattr(lr_scheduler, "step") else lr_scheduler)
    check_functions(initialise=initialise, collate_fn=collate_fn)
    check_flags(shuffle=shuffle)
    check_unit_classes(model, unit_classes, is_built=not is_list)
    check_cut(model, partition_method, head_modules, is_list_of_layers=is_list)
    model_parameters = checked_groups(model_parameters)
    if training_data is not None:
        check_dataset(training_data)
    has_dtype = sets_dtype(config, settings)
    if not has_dtype:
        settings = with_dtype_of(model, settings, is_first=_rank() == 0)
    if settings.parallel.dp_zero_stage == 3:
        _refuse_graphs(model)
    own_optimizer: torch.optim.Optimizer | None = None
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        trained = [p for p in model.parameters() if p.requires_grad] if model_parameters is None else model_parameters
        optimizer = make_optimizer(optimizer, trained)
        model_parameters = None
    if optimizer is not None:
        known = settings_from(optimizer, settings.optimizer)
        own_optimizer = optimizer if known is None else None
        settings = replace(settings, optimizer=known or settings_of_class(optimizer, settings.optimizer))
        if model_parameters is not None:
            raise ConfigError("give optimizer or model_parameters; the optimizer has its parameters already")
        model_parameters = optimizer.param_groups
    world = _join(settings)
    check_same_settings(settings, world.device)
    settings = check_engine_settings(settings, world.size)
    set_process_switches(settings)
    detach_engine(model)
    options: dict[str, Any] = {"model_parameters": model_parameters, "own_optimizer": own_optimizer}
    options |= {"unit_classes": unit_classes, "initialise": initialise}
    if settings.parallel.pipeline_model_parallel_size > 1 or isinstance(model, PipelineModule):
        options |= {"partition_method": partition_method, "head_modules": head_modules, "has_dtype": has_dtype}
        engine: Engine = PipelineEngine(model, settings, world, **options)
    else:
        engine = Engine(model, settings, world, trains=trains, **options)
    if optimizer is not None:
        engine.optimizer.defaults.update(optimizer.defaults)
    loader = None
    if training_data is not None:
        loader = engine.make_loader(training_data, collate_fn=collate_fn, shuffle=shuffle)
    engine.set_scheduler(lr_scheduler, replaced=optimizer)
    return Initialized(engine, engine.optimizer, loader, engine.lr_scheduler)


def parallelize(
    model: nn.Module,
    tensor: int = 2,
    *,
    expert: int = 1,
    sequence: bool = False,
    plan: Plan | None = None,
    heads: Heads | None = None,
) -> nn.Module:
    """Split ``model`` over groups of ``tensor`` ranks in place, and its experts over ``expert`` ranks; return it for
    ``initialize``.

    ``plan``: styles by names of modules, with ``*`` for the indices of layers, such as ``{"layers.*.q_proj":
    "colwise", "layers.*.o_proj": "rowwise"}`` (``tensor_plan.STYLES``); by default the plan of a transformers model,
    else rules on the names of linear layers. ``heads``: the number of attention heads, or the names of the attributes
    of attention modules that hold numbers of heads, if other names than ``tensor_heads.HEAD_COUNTS`` do. Ranks begin
    with the weights of rank 0. ``initialize`` with ``tensor_model_parallel_size`` and ``expert_model_parallel_size``
    splits a model that was not split before in the same way.

    Each kind of split module is run whole and split, here or in its first forward, and the results are compared.
    Errors: ``ConfigError`` and ``LayoutError`` on all ranks. ``verify.verify_module`` checks the whole model.
    """
    if sequence:
        raise ConfigError("sequence=True: sequence parallelism is not supported for a model of your own; remove it")
    check_model(model)
    check_positive(tensor=tensor, expert=expert)
    check_heads(model, heads)
    check_plan_type("plan", plan)
    settings = RunConfig.from_flat({"tensor_model_parallel_size": tensor, "expert_model_parallel_size": expert})
    world = _join(settings)
    groups = make_groups(settings.parallel, world, ends=(0, 0))
    if getattr(model, "tensor_parallel_size", 1) > 1 or getattr(model, "expert_parallel_size", 1) > 1:
        raise ConfigError("parallelize: the model is split already; call it once")
    check_same_module(model, world.device)
    broadcast_from_first([*model.parameters(), *model.buffers()])
    if tensor > 1:
        split_model(model, groups.group("tp"), plan=plan, heads=heads)
    elif plan is not None:
        check_tensor_plan(model, groups.group("tp"), plan)
    if expert > 1:
        split_experts(model, groups, world.device)
    return model


def _refuse_graphs(model: nn.Module) -> None:
    """ConfigError if the program has compiled the model, or a module in place; a wrapped module runs its hooks."""
    for name, module in model.named_modules():
        is_wrapper = hasattr(module, "_orig_mod")
        if is_compiled(module) and not (name and is_wrapper):
            state = "is the result of torch.compile" if is_wrapper else "is compiled by its method compile()"
            raise ConfigError(
                f"{name or 'model'} {state}, whose graphs cannot gather weights at zero_stage=3; give the model "
                "itself, and set compile=True, which compiles its units"
            )


def _rank() -> int:
    """This process's rank, before or after the start of torch.distributed."""
    return dist.get_rank() if dist.is_initialized() else World.from_environment().rank


def _join(config: RunConfig) -> World:
    """Join the processes of the launcher, unless torch.distributed is initialized already."""
    world = World.from_environment()
    if dist.is_initialized():
        local = read_integer("LOCAL_RANK", 0)
        return World(dist.get_rank(), dist.get_world_size(), local, world.device)
    parallel = config.parallel
    start_world(world, backend=parallel.distributed_backend, timeout_minutes=parallel.distributed_timeout_minutes)
    return world
