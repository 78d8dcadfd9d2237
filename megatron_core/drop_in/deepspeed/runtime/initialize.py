"""``deepspeed.initialize``."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn

from deepspeed.accelerator import get_accelerator
from deepspeed.comm.comm import init_distributed
from deepspeed.constants import TORCH_DISTRIBUTED_DEFAULT_PORT
from deepspeed.git_version_info import git_branch, git_hash, version
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.pipe.module import PipelineModule
from deepspeed.translation import read_json
from deepspeed.utils.logging import log_dist
from megatron_core.any_model.arguments import check_functions, check_model
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
    yields this rank's micro-batches. Optimizer, loader and scheduler are None if they are not given.

    Errors: ``ConfigError`` and ``LayoutError`` on all ranks, each with one sentence.
    """
    check_functions(collate_fn=collate_fn)
    check_model(model)
    assert model is not None
    if mesh_param is not None:
        raise ConfigError(f"mesh_param={mesh_param!r}: sequence parallelism is not supported; remove it")
    is_pipeline = isinstance(model, PipelineModule)
    if is_pipeline and mpu is not None:
        raise ConfigError("mpu with a PipelineModule: the module has its own, model.mpu(); leave mpu out")
    if isinstance(model, PipelineModule):
        mpu = model.mpu()
    if mpu is not None and mpu.get_model_parallel_world_size() > 1:
        raise ConfigError(
            "mpu with model parallelism: the layers of Megatron-LM need its engine; run the program with "
            "megatron.core of this drop-in, or split the model with megatron_core.parallelize"
        )
    init_distributed(distributed_port=distributed_port, dist_init_required=dist_init_required)
    with raising_on_all_ranks(torch.device(get_accelerator().current_device_name())):
        values = read_json(_chosen(args, config, config_params))
        settings = DeepSpeedConfig(values, mpu)
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
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


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


def init_inference(model: nn.Module, config: Mapping[str, Any] | str | None = None, **kwargs: Any) -> NoReturn:
    """Refer to the generation of this project."""
    raise ConfigError(
        "deepspeed.init_inference is not supported: use megatron-serve (docs/generation.md), or the model"
    )


def tp_model_init(model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **kwargs: Any) -> nn.Module:
    """Accept ``tp_size=1``; ``ConfigError`` for more, which is ``megatron_core.parallelize``."""
    if tp_size != 1:
        raise ConfigError(f"tp_size={tp_size}: split the model with megatron_core.parallelize(model, tensor={tp_size})")
    return model
