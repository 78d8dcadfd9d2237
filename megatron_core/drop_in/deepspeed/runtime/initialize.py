"""``deepspeed.initialize``."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.comm import init_distributed
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT  # type: ignore[import-not-found,unused-ignore]
from deepspeed.git_version_info import git_branch, git_hash, version
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.runtime.sequence_parallel.ulysses_sp import SequenceRanks
from deepspeed.translation import read_json
from deepspeed.utils.logging import log_dist
from megatron_core.any_model import parallelize
from megatron_core.any_model.arguments import check_functions, check_model
from megatron_core.any_model.gated_experts import expert_size_of
from megatron_core.errors import ConfigError
from megatron_core.parallel.texts import raising_on_all_ranks

INFO = f"DeepSpeed info: version={version}, git-hash={git_hash}, git-branch={git_branch}"
Initialized = tuple[DeepSpeedEngine, Any, Any, Any]


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: torch.optim.Optimizer | Callable[[list[Any]], torch.optim.Optimizer] | None = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = TORCH_DISTRIBUTED_DEFAULT_PORT,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
) -> Initialized:
    """Prepare ``model`` for training; return (engine, optimizer, loader, scheduler).

    ``config``: JSON configuration as a dict or a file; also as ``config_params`` or ``args.deepspeed_config``.
    ``optimizer`` and ``lr_scheduler`` replace those of the JSON; each is an object, or a function of the parameters or
    of the optimizer. ``model_parameters``: parameters or groups of the optimizer. The loader of ``training_data``
    yields this rank's micro-batches. ``mesh_param``: numbers of ranks (data, sequence). Optimizer, loader and scheduler
    are None if they are not given.

    Errors: ``ConfigError`` and ``LayoutError`` on all ranks, each with one sentence.
    """
    check_functions(collate_fn=collate_fn)
    check_model(model)
    assert model is not None
    is_pipeline = isinstance(model, PipelineModule)
    if is_pipeline and mpu is not None:
        raise ConfigError("mpu with a PipelineModule: the module has its own, model.mpu(); leave mpu out")
    if isinstance(model, PipelineModule):
        mpu = model.mpu()
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    with raising_on_all_ranks(torch.device(get_accelerator().current_device_name())):
        values = _with_sizes(read_json(_chosen(args, config, config_params)), model, mesh_param)
        evaluates_whole = isinstance(mpu, SequenceRanks)
        has_mpu = mpu is not None and not evaluates_whole
        if isinstance(mpu, SequenceRanks):
            values, mpu = _with_size(values, None, "sequence_parallel_size", mpu.size, f"sp_size={mpu.size}"), None
        mpu = mpu if mpu is None or is_pipeline else _without_tensor_groups(mpu, values)
        settings = DeepSpeedConfig(values, mpu, has_mpu=has_mpu)
    for sentence in (INFO, *settings.translation.notes):
        log_dist(sentence, ranks=[0])
    kind: Any = PipelineEngine if is_pipeline else DeepSpeedEngine
    engine: DeepSpeedEngine = kind(
        args=args,
        model=model,
        optimizer=optimizer,
        model_parameters=model_parameters,
        training_data=training_data,
        lr_scheduler=lr_scheduler,
        mpu=mpu,
        dist_init_required=dist_init_required,
        collate_fn=collate_fn,
        config=values,
        config_class=settings,
    )
    engine.core.splits_in_evaluation = not evaluates_whole
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _without_tensor_groups(mpu: Any, values: Mapping[str, Any]) -> Any:
    """Return None for an ``mpu`` with the groups that the engine makes itself for ``tensor_parallel.autotp_size``."""
    size = mpu.get_model_parallel_world_size()
    if size == 1:
        return mpu
    neighbours = [dist.get_rank() // size * size + number for number in range(size)]
    is_equal = dist.get_process_group_ranks(mpu.get_model_parallel_group()) == neighbours
    if not is_equal or (values.get("tensor_parallel") or {}).get("autotp_size") != size:
        raise ConfigError(
            f"mpu with {size} model-parallel ranks: set tensor_parallel.autotp_size={size} in the JSON, and use "
            "groups of neighbouring ranks; the layers of Megatron-LM need its engine, megatron.core of this drop-in"
        )
    return None


def _chosen(args: Any, config: Any, config_params: Any) -> Any:
    """Return the only configuration that is given."""
    given = {
        "config": config,
        "config_params": config_params if config is None else None,
        "args.deepspeed_config": getattr(args, "deepspeed_config", None),
        "args.deepscale_config": getattr(args, "deepscale_config", None),
    }
    found = {name: value for name, value in given.items() if value is not None}
    if len(found) != 1:
        raise ConfigError(
            f"{' and '.join(found)} are given; give one of them"
            if found
            else "no DeepSpeed configuration: give config= to deepspeed.initialize, or --deepspeed_config"
        )
    (value,) = found.values()
    return value


def _with_sizes(values: dict[str, Any], model: nn.Module, mesh_param: Any) -> dict[str, Any]:
    """Return the configuration with the sizes of ``mesh_param``, and of a model that is split already."""
    if mesh_param is not None:
        values = _with_size(values, None, "sequence_parallel_size", mesh_param[1], f"mesh_param={mesh_param!r}")
    if (tensor := getattr(model, "tensor_parallel_size", 1)) > 1:
        values = _with_size(values, "tensor_parallel", "autotp_size", tensor, f"a model split over {tensor} ranks")
    if (expert := max(getattr(model, "expert_parallel_size", 1), expert_size_of(model))) > 1:
        values = _with_size(values, "expert_parallel", "autoep_size", expert, f"experts split over {expert} ranks")
        values["expert_parallel"]["enabled"] = True
    return values


def _with_size(values: dict[str, Any], section: str | None, key: str, size: int, source: str) -> dict[str, Any]:
    keys = values if section is None else values.get(section) or {}
    if keys.get(key, size) != size:
        name = key if section is None else f"{section}.{key}"
        raise ConfigError(f"{name}={keys[key]} contradicts {source}; set {name}={size}, or remove it")
    changed = {**keys, key: size}
    return changed if section is None else {**values, section: changed}


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any) -> nn.Module:
    """Convert ``model`` to ``dtype``, and split it over ``tp_size`` ranks by ``megatron_core.parallelize``."""
    if kwargs:
        raise ConfigError(f"tp_model_init: {', '.join(kwargs)} is not supported; remove it")
    init_distributed()
    return model.to(dtype) if tp_size == 1 else parallelize(model.to(dtype), tensor=tp_size)
